"""A drawn object of two touching parts: the watershed takes both unless a negative point lies in the wrong one."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.rewards.segmentation.small_sam2 import save_sam2
from visual_grpo.common.images import read_image, to_tensor
from visual_grpo.common.masks import read_mask
from visual_grpo.common.types import PromptRecord, RewardOutput, TextSample
from visual_grpo.rewards.negative_points import (
    NegativePointsReward,
    box_term,
    number_term,
    placement_term,
    points_term,
    spaced,
)
from visual_grpo.rewards.segmentation.sam2 import Sam2Segmenter

SIDE = 40
LEFT, RIGHT, GROUND = (10, 20), (28, 20), (20, 3)
"""(x, y) inside the queried part, inside the other part, and outside both."""


@pytest.fixture
def record(tmp_path: Path) -> PromptRecord:
    image = np.full((SIDE, SIDE, 3), 10, np.uint8)
    image[10:30, 5:20] = (200, 40, 40)
    image[10:30, 20:35] = (225, 65, 65)
    mask = np.zeros((SIDE, SIDE), np.uint8)
    mask[10:30, 5:20] = 255
    paths = tmp_path / "a.png", tmp_path / "a_mask.png"
    for array, path in zip((image, mask), paths, strict=True):
        Image.fromarray(array).save(path)
    metadata = {"box": [5, 10, 19, 29], "points": [list(LEFT)]}
    return PromptRecord(id="a", prompt="dark red", source_images=paths[:1], target_image=paths[1], metadata=metadata)


def said(
    negatives: Sequence[tuple[int, int]] = (), point: tuple[int, int] = LEFT, box: Sequence[int] = (5, 10, 19, 29)
) -> TextSample:
    text = f'{{"bbox":{list(box)},"points":[{list(point)}],"negative_points":{[list(n) for n in negatives]}}}'
    return TextSample(text=f"<answer>{text}</answer>", finished=True, frame=(SIDE, SIDE))


NONSENSE = TextSample(text="there", finished=True, frame=(SIDE, SIDE))
CUT = TextSample(text=said().text, finished=False, frame=(SIDE, SIDE))


def judge(record: PromptRecord, *samples: TextSample, **options: Any) -> RewardOutput:
    return NegativePointsReward(**options)([record] * len(samples), samples)


def test_masks_with_and_without_negatives(record: PromptRecord) -> None:
    # The last: a negative that only corrects the policy's own wrong positive earns no contrast.
    confusing = [said([RIGHT], point=RIGHT), said([GROUND], point=GROUND)]
    got = judge(record, said([RIGHT]), said(), said([GROUND]), said([LEFT]), said(point=RIGHT), *confusing)
    assert got.parts["gIoU"].tolist() == [1, 0.5, 0.5, 0, 0.5, 0, 0]
    assert got.parts["gIoU_without"][:5].tolist() == [0.5] * 5
    assert got.parts["contrast"].tolist() == [0.5, 0, 0, -0.5, 0, 0.5, 0]
    assert got.parts["placement"][:5].tolist() == [1, 0, 0, -1, 0]
    part, whole = 20 * 15, 20 * 30
    counts = [tuple(pair) for pair in zip(*(side.tolist() for side in got.ratios["cIoU"]), strict=True)]
    assert counts[:2] == [(part, part), (part, whole)]
    thought = TextSample(text=f"<think>so</think>{said().text}", finished=True, frame=(SIDE, SIDE))
    assert judge(record, said(), thought, think=True).parts["format"].tolist() == [0, 1]


def test_masks_of_answers_need_no_truth_and_are_those_that_are_judged(record: PromptRecord) -> None:
    reward, many = NegativePointsReward(), said([RIGHT, GROUND])
    pixels, truth = to_tensor(read_image(record.source_images[0])), read_mask(record.target_image or "")
    without, none, with_ = reward.masks(pixels, [said(), NONSENSE, many])
    assert none is None
    judged = judge(record, said(), many).parts["gIoU"].tolist()
    masks = [mask for mask in (without, with_) if mask is not None]
    assert judged == pytest.approx([float((mask & truth).sum() / (mask | truth).sum()) for mask in masks])
    assert judged[1] > judged[0]
    assert reward.masks(pixels, [CUT]) == [None]


def test_the_reward_is_the_weighted_sum_of_its_terms(record: PromptRecord) -> None:
    # IoU 1, contrast .5, both negatives well placed but one of two too close, format, box and point right
    terms = {"iou": 1, "contrast": 0.5, "placement": 1, "number": -0.5, "format": 1, "box": 1, "points": 1}
    weights = dict(zip(terms, (3.0, 0.7, 0.11, 0.13, 0.17, 0.19, 0.23), strict=True))
    got = judge(record, said([RIGHT, RIGHT], box=(5, 10, 19, 28)), weights=weights)
    assert got.values.tolist() == pytest.approx([sum(weights[term] * terms[term] for term in terms)])
    assert got.parts["box"].tolist() == [1]


def test_unusable_answers_are_counted_and_score_lowest(record: PromptRecord) -> None:
    crowd = [LEFT, (11, 20), (10, 21), (11, 21)]
    got = judge(record, NONSENSE, CUT, said(crowd, point=GROUND, box=(0, 0, 1, 1)))
    told = {name: got.parts[name].tolist() for name in ("malformed", "truncated", "format", "gIoU")}
    assert told == {"malformed": [1, 0, 0], "truncated": [0, 1, 0], "format": [0, 0, 1], "gIoU": [0, 0, 0]}
    assert got.values[0] == got.values[1] < got.values[2]
    assert got.values[0] == pytest.approx(-(0.5 + 0.2 + 0.05))


def test_negatives_beyond_the_cap_are_not_used(record: PromptRecord) -> None:
    far = [GROUND, (3, 3), (36, 3), (3, 36)]
    got = judge(record, said([*far, RIGHT]), said([*far[:3], RIGHT]))
    assert got.parts["gIoU"].tolist() == [0.5, 1]
    assert got.parts["number"].tolist() == pytest.approx([-0.2, 0])


def test_queries_about_one_file_have_a_truth_each(record: PromptRecord, tmp_path: Path) -> None:
    mask = np.zeros((SIDE, SIDE), np.uint8)
    mask[10:30, 20:35] = 255
    Image.fromarray(mask).save(tmp_path / "b_mask.png")
    metadata = {"box": [20, 10, 34, 29], "points": [list(RIGHT)]}
    other = replace(record, id="b", prompt="light red", target_image=tmp_path / "b_mask.png", metadata=metadata)
    got = NegativePointsReward()([record, other], [said([RIGHT]), said([LEFT], point=RIGHT, box=(20, 10, 34, 29))])
    assert got.parts["gIoU"].tolist() == [1, 1]


def test_sam2_encodes_an_image_once_for_all_its_queries(record: PromptRecord, tmp_path: Path) -> None:
    save_sam2(tmp_path / "sam2")
    reward = NegativePointsReward(segmenter={"kind": "sam2", "path": str(tmp_path / "sam2"), "device": "cpu"})
    assert isinstance(reward.segmenter, Sam2Segmenter)
    encoded: list[int] = []
    reward.segmenter.model.vision_encoder.register_forward_hook(lambda *_: encoded.append(1))
    # Another record with the same image has a separate prepared file.
    other = replace(record, id="b", source_images=(Path(shutil.copy(tmp_path / "a.png", tmp_path / "b.png")),))
    for _ in range(3):
        reward([record] * 4 + [other], [said(), said([RIGHT]), NONSENSE, said([LEFT]), said()])
        reward.picture(record, said())
    assert len(encoded) == 1


def test_the_picture_shows_three_panels(record: PromptRecord) -> None:
    reward = NegativePointsReward()
    picture = reward.picture(record, said([RIGHT]))
    assert picture.dtype == torch.uint8
    side = picture.shape[2]
    assert picture.shape == (3, 3 * side + 2 * 4, side)
    _, without, with_ = (picture[:, n * (side + 4) : n * (side + 4) + side] for n in range(3))
    # Above the negative's cross the other part is painted in the second panel and bare in the third.
    spot = (slice(None), round((15 + 0.5) * side / SIDE), round((28 + 0.5) * side / SIDE))
    assert without[spot].tolist() != with_[spot].tolist() == [225, 65, 65]
    assert reward.picture(record, NONSENSE).shape == picture.shape


CONFUSED, TRUTH, NOTHING = (torch.zeros(10, 10, dtype=torch.bool) for _ in range(3))
CONFUSED[:, 6:] = True
TRUTH[:, :4] = True


@pytest.mark.parametrize(
    ("negatives", "expected", "without_confusion"),
    [
        ([(8, 5)], 1, 0),
        ([(2, 5)], -1, -1),
        ([(5, 5)], 0, 0),
        ([(8, 5), (9, 1), (5, 5), (2, 0)], 0.25, -0.25),
        ([], 0, 1),
        ([(20, 5)], 1, 0),  # beyond the image counts as its edge
    ],
)
def test_placement(negatives: list[tuple[float, float]], expected: float, without_confusion: float) -> None:
    assert placement_term(negatives, CONFUSED, TRUTH) == expected
    assert placement_term(negatives, NOTHING, TRUTH) == without_confusion


def test_negatives_are_spaced_and_capped() -> None:
    points = [(0.0, 0.0), (3.0, 0.0), (5.0, 0.0), (9.0, 0.0), (5.0, 5.0)]
    assert spaced(points, 9, 4.0) == ((0.0, 0.0), (5.0, 0.0), (9.0, 0.0), (5.0, 5.0))
    assert spaced(points, 2, 4.0) == ((0.0, 0.0), (5.0, 0.0))
    assert number_term(points, spaced(points, 2, 4.0)) == -0.6
    assert number_term([], ()) == 0 == number_term(points, points)


def test_the_box_term_has_two_halves() -> None:
    truth, size = (100.0, 100.0, 299.0, 299.0), (840, 840)
    assert box_term(truth, truth, size) == 1
    assert box_term((109.0, 109.0, 308.0, 308.0), truth, size) == 1  # 9 pixels of 840 in each coordinate
    assert box_term((111.0, 111.0, 310.0, 310.0), truth, size) == 0.5  # 11: only the overlap is good
    assert box_term((100.0, 100.0, 199.0, 299.0), truth, size) == 0  # exactly half of it is not above a half
    assert box_term((100.0, 100.0, 200.0, 299.0), truth, size) == 0.5
    assert box_term((118.0, 100.0, 317.0, 299.0), truth, (840, 1680)) == 1  # distances are shares of a side


def test_points_are_in_the_box_and_near() -> None:
    box, size = (0.0, 0.0, 400.0, 400.0), (840, 840)
    assert points_term([(90, 0), (0, 99)], [(0, 0)], box, size) == 1
    assert points_term([(101, 0)], [(0, 0)], box, size) == 0
    assert points_term([(150, 0), (0, 0)], [(0, 0)], box, size) == 1  # on average
    assert points_term([(150, 0), (0, 0)], [(0, 0), (140, 0)], box, size) == 1
    assert points_term([(10, 10), (0, 401)], [(0, 0), (0, 401)], box, size) == 0
