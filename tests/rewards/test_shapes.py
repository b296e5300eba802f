"""The judge of drawn shapes against drawings of known attributes."""

from __future__ import annotations

import random
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.rewards.shapes import ShapesReward
from visual_grpo.shapes_world import ATTRIBUTES, BACKGROUND, COLORS, COMBINATIONS, Combination
from visual_grpo.starter.shapes import draw
from visual_grpo.types import PromptRecord, RewardOutput

ASKED = Combination(color="red", shape="circle", position="left", size="small")


def record(combination: Combination, name: str = "r") -> PromptRecord:
    return PromptRecord(id=name, prompt=combination.prompt, metadata=asdict(combination))


def image(combination: Combination, height: int = 128, width: int = 128) -> Tensor:
    drawn = draw(combination, height, width, random.Random(3))
    return torch.from_numpy(np.array(drawn)).permute(2, 0, 1)


def judge(asked: Combination, sample: Tensor) -> RewardOutput:
    return ShapesReward()([record(asked)], [sample])


@pytest.mark.parametrize("size", [(128, 128), (64, 64), (96, 160), (256, 128), (101, 130)])
def test_every_true_drawing_is_right(size: tuple[int, int]) -> None:
    records = [record(combination) for combination in COMBINATIONS]
    scores = ShapesReward()(records, [image(combination, *size) for combination in COMBINATIONS])
    assert list(scores.parts) == [*ATTRIBUTES, "all"]
    for part in scores.parts.values():
        assert part.tolist() == [1.0] * len(COMBINATIONS)
    assert scores.values.dtype == torch.float32
    assert scores.values.min() > 0.98
    assert scores.values.max() <= 1


@pytest.mark.parametrize(
    ("attribute", "drawn"),
    [
        *(("color", color) for color in ("green", "blue", "yellow", "purple")),
        *(("shape", shape) for shape in ("square", "triangle")),
        *(("position", position) for position in ("right", "top", "bottom", "center")),
        ("size", "large"),
    ],
)
def test_a_wrong_attribute_lowers_its_own_part_alone(attribute: str, drawn: str) -> None:
    scores = judge(ASKED, image(replace(ASKED, **{attribute: drawn})))
    wrong = {part for part, value in scores.parts.items() if value.item() == 0}
    assert wrong == {attribute, "all"}
    assert scores.values.item() < 0.8


def test_a_mixed_batch_of_sizes_keeps_its_order() -> None:
    sizes = [(64, 64), (128, 64), (64, 64), (96, 96)]
    samples = [image(COMBINATIONS[i * 30], *size) for i, size in enumerate(sizes)]
    records = [record(COMBINATIONS[i * 30], str(i)) for i in range(4)]
    assert ShapesReward()(records, samples).parts["all"].tolist() == [1, 1, 1, 1]
    assert ShapesReward()(records[::-1], samples).parts["all"].tolist() == [0, 0, 0, 0]


def test_the_value_falls_smoothly_with_the_colour() -> None:
    true = image(ASKED).float()
    background = torch.tensor(BACKGROUND, dtype=torch.float32)[:, None, None]
    faded = [(background + share * (true - background)).round().to(torch.uint8) for share in (1.0, 0.85, 0.7, 0.5)]
    scores = ShapesReward()([record(ASKED)] * 4, faded)
    assert (scores.values.diff() < -0.02).all()
    assert scores.parts["shape"].tolist() == [1, 1, 1, 1]
    assert scores.parts["color"].tolist()[0] == 1
    assert scores.parts["color"].tolist()[-1] == 0


@pytest.mark.parametrize("value", [BACKGROUND[0], 128])
def test_an_image_without_a_shape_is_wrong(value: int) -> None:
    scores = judge(ASKED, torch.full((3, 128, 128), value, dtype=torch.uint8))
    assert scores.parts["all"].item() == 0
    assert scores.values.item() < 0.4


def test_nothing_at_all_scores_zero() -> None:
    blank = torch.tensor(BACKGROUND, dtype=torch.uint8)[:, None, None].expand(3, 128, 128)
    assert judge(ASKED, blank).values.item() == 0


def test_a_second_object_spoils_the_shape() -> None:
    two = torch.maximum(image(ASKED), image(replace(ASKED, position="right")))
    scores = judge(ASKED, two)
    assert scores.parts["shape"].item() == 0
    assert scores.parts["color"].item() == 1


def test_missing_metadata_is_named() -> None:
    bare = PromptRecord(id="cat-7", prompt="a cat", metadata={"color": "red", "size": "small"})
    with pytest.raises(UserError, match=r"'cat-7'.*shape, position"):
        ShapesReward()([bare], [image(ASKED)])


def test_an_unknown_word_is_named() -> None:
    odd = PromptRecord(id="r1", prompt="", metadata={**asdict(ASKED), "color": "pink"})
    with pytest.raises(UserError, match=f"'r1'.*'pink'.*{', '.join(COLORS)}"):
        ShapesReward()([odd], [image(ASKED)])
