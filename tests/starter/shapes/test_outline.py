"""The guard of shapes' outlines on drawings whose faults are known."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from visual_grpo.common.images import to_tensor
from visual_grpo.common.types import PromptRecord
from visual_grpo.starter.shapes.outline import OutlineGuard
from visual_grpo.starter.shapes.render import BACKGROUND, COMBINATIONS, Combination, Jitter, draw, draw_scene

CIRCLE = Combination(color="red", shape="circle", position="left", size="large")
SQUARE = Combination(color="blue", shape="square", position="right", size="small")
TRIANGLE = replace(SQUARE, shape="triangle")


def polygon(*corners: tuple[float, float], color: tuple[int, int, int] = (220, 40, 40)) -> Tensor:
    canvas = Image.new("RGB", (128, 128), BACKGROUND)
    ImageDraw.Draw(canvas).polygon(corners, fill=color)
    return to_tensor(canvas)


def scene(*things: Combination) -> Tensor:
    return to_tensor(draw_scene([(thing, Jitter(dx=0, dy=0, scale=1)) for thing in things], 128, 128))


def score(thing: Combination, picture: Tensor, **metadata: object) -> float:
    record = PromptRecord(id="r", prompt=thing.prompt, metadata={**asdict(thing), **metadata})
    return float(OutlineGuard()([record], [picture])[0])


def test_true_drawings_fill_their_figures() -> None:
    rng = random.Random(0)
    values = [score(thing, to_tensor(draw(thing, 96, 160, rng))) for thing in COMBINATIONS]
    assert all(value > 0.93 for value in values)  # A figure without a value has none.


OCTAGON = [(64 + 29 * math.cos(a * math.pi / 4), 64 + 29 * math.sin(a * math.pi / 4)) for a in range(8)]
FAULTS: dict[str, tuple[Combination, Sequence[tuple[float, float]], float]] = {
    "a circle with corners": (CIRCLE, OCTAGON, 0.92),
    "a square without a corner": (SQUARE, [(40, 40), (80, 40), (80, 66), (66, 80), (40, 80)], 0.95),
    "a square that sags": (SQUARE, [(40, 40), (80, 40), (76, 60), (80, 80), (40, 80)], 0.96),
    "a triangle with a step": (TRIANGLE, [(64, 40), (74, 60), (74, 70), (84, 80), (44, 80)], 0.93),
    "a triangle without its top": (TRIANGLE, [(61, 50), (67, 50), (84, 80), (44, 80)], 0.95),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_outline_that_is_not_well_formed_is_worth_less(fault: str) -> None:
    asked, corners, most = FAULTS[fault]
    assert score(asked, scene(asked)) > 0.98
    assert 0.6 < score(asked, polygon(*corners)) < most


def test_a_faded_colour_changes_no_outline() -> None:
    background = torch.tensor(BACKGROUND).view(3, 1, 1).float()
    faded = (background + 0.4 * (scene(CIRCLE).float() - background)).round().to(torch.uint8)
    assert score(CIRCLE, faded) == pytest.approx(score(CIRCLE, scene(CIRCLE)), abs=0.01)


@pytest.mark.parametrize(
    ("asked", "metadata", "shown", "scored"),
    [
        (CIRCLE, {}, [CIRCLE], True),
        (CIRCLE, {}, [replace(CIRCLE, color="green", position="top")], True),
        (CIRCLE, {}, [replace(CIRCLE, shape="square")], False),
        (CIRCLE, {}, [replace(CIRCLE, size="small")], False),
        (CIRCLE, {}, [CIRCLE, SQUARE], False),
        (CIRCLE, {}, [], False),
        (CIRCLE, {"edit": "add", "other": asdict(SQUARE)}, [CIRCLE, SQUARE], True),
        (CIRCLE, {"edit": "add", "other": asdict(SQUARE)}, [SQUARE], False),
        (CIRCLE, {"edit": "add", "other": asdict(SQUARE)}, [CIRCLE, replace(SQUARE, size="large")], False),
        (CIRCLE, {"edit": "remove", "other": asdict(SQUARE)}, [SQUARE], True),
        (CIRCLE, {"edit": "remove", "other": None}, [], False),
    ],
)
def test_only_the_asked_shapes_are_measured(
    asked: Combination, metadata: dict[str, object], shown: list[Combination], scored: bool
) -> None:
    assert math.isnan(score(asked, scene(*shown), **metadata)) != scored
