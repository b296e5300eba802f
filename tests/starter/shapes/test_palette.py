from __future__ import annotations

import random
from dataclasses import asdict

import pytest
import torch

from visual_grpo.images import to_tensor
from visual_grpo.starter.shapes.draw import draw
from visual_grpo.starter.shapes.reward import PaletteReward
from visual_grpo.starter.shapes.world import BACKGROUND, CHANGES, COMBINATIONS, Combination
from visual_grpo.types import PromptRecord

RECORDS = [PromptRecord(id=str(i), prompt=c.prompt, metadata=asdict(c)) for i, c in enumerate(COMBINATIONS[::10])]
CIRCLE = Combination(color="red", shape="circle", position="left", size="small")
SQUARE = Combination(color="blue", shape="square", position="right", size="large")


def mixed(share: float) -> list[torch.Tensor]:
    """Drawn shapes with a share of the background in their colours."""
    background = torch.tensor(BACKGROUND, dtype=torch.float32).view(3, 1, 1)
    drawn = [to_tensor(draw(c, 128, 128, random.Random(0))).float() for c in COMBINATIONS[::10]]
    return [(background + (1 - share) * (image - background)).round().to(torch.uint8) for image in drawn]


def test_full_colours_are_worth_most_and_fading_costs_in_proportion() -> None:
    full, faded, dull = (PaletteReward()(RECORDS, mixed(share)).values for share in (0.0, 0.2, 0.4))
    assert (full > 0.97).all()
    assert (full > faded).all()
    assert (faded > dull).all()
    # A fifth of the way to the background is 0.13 to 0.18 of RGB distance for these colours, of a reach of 0.6.
    torch.testing.assert_close(full - faded, faded - dull, rtol=0, atol=0.06)
    assert ((full - faded) > 0.15).all()


@pytest.mark.parametrize(
    ("metadata", "worth"),
    [
        ({}, 0.0),
        ({"edit": None}, 0.0),
        *(({"edit": edit, "other": None}, 0.0) for edit in (*CHANGES, "add")),
        ({"edit": "add", "other": asdict(SQUARE)}, 0.0),
        ({"edit": "remove", "other": asdict(SQUARE)}, 0.0),
        ({"edit": "remove", "other": None}, 1.0),
    ],
)
def test_a_blank_picture_has_the_floor_or_full_marks(metadata: object, worth: float) -> None:
    assert isinstance(metadata, dict)
    record = PromptRecord(id="r", prompt="", metadata=asdict(CIRCLE) | metadata)
    nothing = torch.tensor(BACKGROUND, dtype=torch.uint8).view(3, 1, 1).expand(3, 128, 128)
    shown = to_tensor(draw(CIRCLE, 128, 128, random.Random(0)))
    blank, drawn = PaletteReward()([record, record], [nothing, shown]).values.tolist()
    assert blank == worth
    assert 0.97 < drawn <= 1
