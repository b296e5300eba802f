"""GenEval's rules by hand, its detector's arithmetic, and the worker with a small Mask2Former over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.rewards.learned import tiny
from tests.rewards.remote.processes import WORKERS, module_of, started, told_at_its_end
from visual_grpo.common.types import PromptRecord, RewardOutput
from visual_grpo.rewards.remote.http_reward import HttpReward
from visual_grpo.rewards.reward import FunctionReward

rules, colours = module_of("geneval", "geneval_rules"), module_of("geneval", "geneval_colours")
detector, NAMES = module_of("geneval", "geneval_detector"), module_of("geneval", "geneval_names").NAMES
# Tasks as the lines of GenEval's evaluation_metadata.jsonl have them.
SINGLE = {"tag": "single_object", "include": [{"class": "bench", "count": 1}]}
TWO = {"tag": "two_object", "include": [{"class": "bench", "count": 1}, {"class": "cat", "count": 1}]}
TWO_CLOCKS = {"include": [{"class": "clock", "count": 2}], "exclude": [{"class": "clock", "count": 3}]}
COUNTING = {"tag": "counting", **TWO_CLOCKS}
COLOUR = {"tag": "colors", "include": [{"class": "car", "count": 1, "color": "pink"}]}
KITE_ABOVE = {"class": "kite", "count": 1, "position": ["above", 0]}
POSITION = {"tag": "position", "include": [{"class": "dog", "count": 1}, KITE_ABOVE]}
GREEN_BUS, RED_APPLE = ({"class": name, "count": 1, "color": c} for name, c in (("bus", "green"), ("apple", "red")))
ATTRIBUTES = {"tag": "color_attr", "include": [GREEN_BUS, RED_APPLE]}


BOX = (0, 0, 10, 10)
SURE, UNSURE = ("clock", BOX, 0.91), ("clock", BOX, 0.9)
MANY = {"tag": "many", "include": [{"class": "cup", "count": 16}], "exclude": [{"class": "cup", "count": 17}]}
TWO_PINK = {"tag": "colors", "include": [{"class": "car", "count": 2, "color": "pink"}]}
DOG, ABOVE, BELOW = ("dog", (0, 50, 10, 60), 0.5), ("kite", (0, 0, 10, 10), 0.5), ("kite", (0, 90, 10, 99), 0.5)
RED_DOG = {**POSITION, "include": [{"class": "dog", "count": 1, "color": "red"}, KITE_ABOVE]}


@pytest.mark.parametrize(
    ("task", "objects", "share"),
    [
        (SINGLE, [("bench", BOX, 0.31)], 1.0),
        (SINGLE, [("bench", BOX, 0.3)], 0.0),  # It must be surer than 0.3.
        (SINGLE, [("bench", BOX, 0.9)] * 2, 1.0),  # More are not excluded.
        (TWO, [("cat", BOX, 0.5), ("bench", BOX, 0.5)], 1.0),
        (TWO, [("cat", BOX, 0.5), ("dog", BOX, 0.5)], 0.5),
        # ClipAndConditions needs a confidence of its own.
        (COUNTING, [SURE, SURE], 1.0),
        (COUNTING, [SURE, SURE, UNSURE], 1.0),
        (COUNTING, [SURE, UNSURE], 0.5),  # At least two: no. Fewer than three: yes.
        (COUNTING, [SURE, SURE, SURE], 0.5),
        ({"tag": "two_object", **TWO_CLOCKS}, [SURE, SURE, UNSURE], 0.5),
        (MANY, [("cup", BOX, 0.5)] * 40, 1.0),  # Only the 16 surest objects of a class count.
        # A colour is that of the surest object.
        (COLOUR, [("car", BOX, 0.5, "pink")], 1.0),
        (COLOUR, [("car", BOX, 0.5, "pink"), ("car", BOX, 0.6, "red")], 0.5),
        (COLOUR, [], 0.0),
        (TWO_PINK, [("car", BOX, 0.5, "pink"), ("car", BOX, 0.6, "red")], 0.5),
        (ATTRIBUTES, [("bus", BOX, 0.5, "green"), ("apple", BOX, 0.5, "red")], 1.0),
        (ATTRIBUTES, [("bus", BOX, 0.5, "red"), ("apple", BOX, 0.5, "green")], 0.5),
        (ATTRIBUTES, [("bus", BOX, 0.5, "green"), ("apple", BOX, 0.5, "green")], 0.75),
        # A place is seen from the object of an earlier entry.
        (POSITION, [DOG, ABOVE], 1.0),
        (POSITION, [DOG, BELOW], 2 / 3),
        (POSITION, [ABOVE], 1 / 3),  # The kite is there; the dog that it should be above is not.
        (POSITION, [DOG], 1 / 3),
        (RED_DOG, [DOG, ABOVE], 0.5),  # A dog of the wrong colour is no dog to be above of.
        (RED_DOG, [(*DOG, "red"), ABOVE], 1.0),
    ],
)
def test_tasks_by_hand(task: dict[str, Any], objects: list[Any], share: float) -> None:
    """Objects are (class, box, confidence, colour)."""
    found: dict[str, list[Any]] = {}
    seen = {}
    for name, box, confidence, *colour in objects:
        one = rules.Found(box, confidence)
        found.setdefault(name, []).append(one)
        seen[id(one)] = colour[0] if colour else "white"
    told = rules.judge(rules.task_of(task, NAMES), found, lambda _, own: [seen[id(one)] for one in own])
    assert (told.correct, told.share) == (share == 1, share)


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        ((20, 0, 30, 10), {"right of"}),
        ((0, 20, 10, 30), {"below"}),
        # 20 and 20 apart: 18 of 28.28 are left on both axes, 0.64.
        ((20, 20, 30, 30), {"right of", "below"}),
        # 20 and 12 apart: 18 and 10 of 23.32 are left, 0.77 and 0.43.
        ((20, 12, 30, 22), {"right of"}),
        # A tenth of both sizes, 2 pixels, is no distance; 3 apart leave 1 of 3.
        ((2, 0, 12, 10), set()),
        ((3, 0, 13, 10), set()),
        # 4.1 apart leave 2.1, just more than half.
        ((4.1, 0, 14.1, 10), {"right of"}),
        ((0, 0, 10, 10), set()),
    ],
)
def test_relations_by_hand(box: Any, expected: set[str]) -> None:
    assert rules.relations(box, (0, 0, 10, 10)) == expected


def asking(entry: dict[str, Any]) -> dict[str, Any]:
    return {"tag": "single_object", "include": [{"class": "cat", "count": 1, **entry}]}


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({}, "must have include or exclude"),
        ({"include": SINGLE["include"]}, "tag must be a text"),
        ({**SINGLE, "include": "bench"}, "include must be a list"),
        (asking({"class": "unicorn"}), "one of COCO's 80 as GenEval names them"),
        (asking({"count": 0}), "count of cat must be"),
        (asking({"color": "grey"}), "color of cat must be"),
        (asking({"position": ["above", 0]}), "an earlier entry"),
        (asking({"position": ["on", 0]}), "position of cat must be"),
    ],
)
def test_metadata_that_is_no_task(metadata: dict[str, Any], reason: str) -> None:
    with pytest.raises(rules.UnusableError, match=reason):
        rules.task_of(metadata, NAMES)


def test_sizes_of_the_detectors_input() -> None:
    assert detector.sizes_of(512, 512) == detector.Sizes((512, 512), (800, 800), (800, 800))
    # 800 / 300 would make the longer side 2400: 1333 / 900 decides. 300 * 1333 / 900 = 444.33.
    assert detector.sizes_of(900, 300) == detector.Sizes((900, 300), (1333, 444), (1344, 448))


def test_what_the_detector_found_by_hand() -> None:
    sizes = detector.Sizes((4, 8), (4, 8), (4, 12))
    class_logits = torch.zeros(3, 81)
    # e^9 / (e^9 + 80) = 0.9902 for a cat; equally sure of a dog and a cow, 0.4951; and "no object".
    class_logits[0, 15] = class_logits[1, [16, 19]] = class_logits[2, 80] = 9.0
    mask_logits = torch.full((3, 4, 12), -5.0)
    mask_logits[0, 1:3, 2:5] = 2.0
    mask_logits[1, 0, 7:] = 1.0  # The filling beyond the eighth column is no part of the picture.
    mask_logits[2] = 9.0
    found = detector.found_in(class_logits, mask_logits, sizes)
    assert sorted(found) == ["cat", "cow", "dog"]
    (cat,), (cow,) = found["cat"], found["cow"]
    assert cat.box == (2, 1, 5, 3)
    assert cat.confidence == pytest.approx(0.9902 * 0.8808, abs=1e-4)  # The logistic of 2 is 0.8808.
    assert cat.mask.sum() == 6
    assert cat.mask.shape == (4, 8)
    assert cow.box == (7, 0, 8, 1)
    assert cow.confidence == pytest.approx(np.exp(9) / (2 * np.exp(9) + 79) * 0.7311, abs=1e-4)
    assert detector.found_in(class_logits[:, :], -mask_logits.abs(), sizes) == {}  # Empty masks are no objects.


def test_only_the_object_is_cut_out() -> None:
    mask = np.zeros((4, 8), dtype=bool)
    mask[1, 2:4] = mask[2, 2] = True
    cut = colours.cut_out(Image.new("RGB", (8, 4), (255, 0, 0)), rules.Found((2, 1, 4, 3), 0.9, mask))
    red, grey = [255, 0, 0], [153, 153, 153]
    assert np.asarray(cut).tolist() == [[red, red], [red, grey]]


@pytest.fixture(scope="module")
def detector_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mask2Former's real classes with drawn weights, nearly certain that every query is a cat."""
    from transformers import Mask2FormerConfig, Mask2FormerImageProcessor, SwinConfig
    from transformers import Mask2FormerForUniversalSegmentation as Model

    widths = ("feature_size", "mask_feature_size", "hidden_dim", "encoder_feedforward_dim", "dim_feedforward")
    stages = [f"stage{number}" for number in (1, 2, 3, 4)]
    backbone = {"depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "window_size": 4, "out_features": stages}
    numbers = {"encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2, "num_queries": 5, "num_labels": 80}
    swin = SwinConfig(image_size=64, embed_dim=8, **backbone)
    config = Mask2FormerConfig(backbone_config=swin, **dict.fromkeys(widths, 32), **numbers)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Model(config)
        with torch.no_grad():
            model.class_predictor.bias[15] += 12
    folder = tmp_path_factory.mktemp("mask2former")
    model.save_pretrained(folder)
    Mask2FormerImageProcessor().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.saved_clip(tmp_path_factory.mktemp("clip"), longest=77)


@pytest.mark.slow
def test_a_small_detector_over_http(detector_folder: Path, clip_folder: Path) -> None:
    cats, coloured = asking({}), [asking({"color": colour}) for colour in COLOURS]
    no_cat = {**cats, "exclude": cats["include"]}
    tasks: list[dict[str, Any]] = [cats, SINGLE, {}, {"include": 5}, no_cat, *coloured]
    prompts = [PromptRecord(id=str(row), prompt="a cat", metadata=task) for row, task in enumerate(tasks)]
    images = [tiny.picture(0)] * len(tasks)
    weights = {"GENEVAL_DETECTOR": str(detector_folder), "GENEVAL_CLIP": str(clip_folder)}

    def scored(reward: HttpReward, rows: slice) -> RewardOutput:
        return FunctionReward("geneval", reward, max_failed_share=0)(prompts[rows], images[rows])

    with started(WORKERS / "geneval" / "worker.py", **weights) as url:
        reward = HttpReward(url, model=f"geneval-correct:{detector_folder}+{clip_folder}")
        output = scored(reward, slice(None))
        alone = scored(reward, slice(5, 6))
    assert output.values[:2].tolist() == [1.0, 0.0]
    assert output.values[2:4].isnan().all()
    assert not output.failed
    assert (float(output.values[4]), float(output.parts["share"][4])) == (0.0, 0.5)
    # A cat has exactly one of the colours, whichever these weights see.
    assert sorted(output.values[5:].tolist()) == [0.0] * 9 + [1.0]
    assert sorted(output.parts["share"][5:].tolist()) == [0.5] * 9 + [1.0]
    assert alone.values[0] == output.values[5]
    with started(WORKERS / "geneval" / "worker.py", GENEVAL_SCORE="share", **weights) as url:
        assert scored(HttpReward(url), slice(4, 5)).values.tolist() == [0.5]


COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")


@pytest.mark.slow
def test_other_weights_are_refused(detector_folder: Path, clip_folder: Path, tmp_path: Path) -> None:
    worker = WORKERS / "geneval" / "worker.py"
    told = told_at_its_end(worker, GENEVAL_DETECTOR=str(tmp_path), GENEVAL_CLIP=str(clip_folder))
    assert told.rstrip().endswith("GENEVAL_DETECTOR and GENEVAL_CLIP name others, or local folders.")
    assert "could not be loaded" in told
    weights = {"GENEVAL_DETECTOR": str(detector_folder), "GENEVAL_CLIP": str(detector_folder)}
    assert "could not be loaded" in told_at_its_end(worker, **weights)
    assert "GENEVAL_SCORE must be correct or share, got 'both'" in told_at_its_end(worker, GENEVAL_SCORE="both")
