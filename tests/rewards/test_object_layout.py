"""Named objects by a detector that finds drawn squares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord
from visual_grpo.rewards.object_layout import COLOURS, ObjectLayout, _lab, colour_of

HERE = "tests.rewards.test_object_layout"
SQUARES = {"dog": (120, 75, 40), "cup": (40, 80, 220)}


def squares(image: Tensor) -> list[Any]:
    """Every square of 20 pixels in one of two colours on a grid of 30; one whose corner is marked, faintly."""
    found = []
    for row in range(3):
        for column in range(3):
            cell = image[:, 30 * row : 30 * row + 20, 30 * column : 30 * column + 20]
            for label, colour in SQUARES.items():
                if torch.equal(cell[:, 10, 10], torch.tensor(colour, dtype=torch.uint8)):
                    score = 0.9 if torch.equal(cell[:, 0, 0], cell[:, 10, 10]) else 0.3
                    top, left = row / 3, column / 3
                    found.append((label, (top, left, top + 2 / 9, left + 2 / 9), score))
    return found


def rubbish(image: Tensor) -> Any:
    return [None, [("dog", (0, 0, 5, 5), 1)], [("dog", 0.5)], [(7, (0, 0, 1, 1), 1)]][int(image[0, 0, 0])]


def scene(*placed: tuple[str, int, int], faint: bool = False) -> Tensor:
    image = torch.full((3, 90, 90), 255, dtype=torch.uint8)
    for label, row, column in placed:
        cell = image[:, 30 * row : 30 * row + 20, 30 * column : 30 * column + 20]
        cell[:] = torch.tensor(SQUARES[label], dtype=torch.uint8)[:, None, None]
        cell[:, 0, 0] = 0 if faint else cell[:, 0, 0]
    return image


def asking(*objects: Any) -> PromptRecord:
    return PromptRecord(id="o", prompt="", metadata={"objects": list(objects)})


def score(record: PromptRecord, image: Tensor, **options: Any) -> float:
    return ObjectLayout(detector=f"{HERE}:squares", **options)([record], [image]).item()


def test_each_condition_counts_alike() -> None:
    record = asking({"label": "Dog", "count": 2, "color": "brown", "position": "left"}, {"label": "cup"})
    assert score(record, scene(("dog", 0, 0), ("dog", 2, 0), ("cup", 1, 1))) == 1
    assert score(record, scene(("dog", 0, 0), ("dog", 2, 2), ("cup", 1, 1))) == 0.75, "one of them is on the right"
    assert score(record, scene(("dog", 0, 0), ("dog", 2, 0))) == 0.75, "no cup"
    three = scene(("dog", 0, 0), ("dog", 1, 0), ("dog", 2, 0), ("cup", 1, 1))
    assert score(record, three) == 0.75, "one too many"
    assert score(record, scene(("cup", 0, 0))) == 0.25
    assert score(asking({"label": "cup", "color": "red"}), scene(("cup", 1, 1))) == 0.5


@pytest.mark.parametrize(("position", "cells"), [
    ("left", {(0, 0), (1, 0), (2, 0)}), ("right", {(0, 2), (1, 2), (2, 2)}), ("top", {(0, 0), (0, 1), (0, 2)}),
    ("bottom", {(2, 0), (2, 1), (2, 2)}), ("center", {(1, 1)}),
])  # fmt: skip
def test_places_are_thirds_of_the_image(position: str, cells: set[tuple[int, int]]) -> None:
    record = asking({"label": "dog", "position": position})
    held = {(r, c) for r in range(3) for c in range(3) if score(record, scene(("dog", r, c))) == 1}
    assert held == cells


def test_faint_detections_do_not_count() -> None:
    faint = scene(("dog", 1, 1), faint=True)
    assert score(asking({"label": "dog"}), faint) == 0
    assert score(asking({"label": "dog"}), faint, threshold=0.3) == 1


def test_colours_by_name() -> None:
    between = [("red", (160, 10, 20)), ("blue", (20, 20, 160)), ("green", (20, 120, 20)), ("yellow", (255, 255, 90))]
    between += [(name, (level,) * 3) for name, level in (("black", 20), ("white", 240), ("grey", 120))]
    for name, rgb in [*between, *((name, rgb) for name, typical in COLOURS.items() for rgb in typical)]:
        assert colour_of(torch.tensor(rgb, dtype=torch.uint8)[:, None, None].expand(3, 4, 4)) == name
    # The primary red of sRGB in CIELAB, as CIE's formulas give it.
    assert _lab(torch.tensor([255.0, 0, 0]).double()).tolist() == pytest.approx([53.24, 80.09, 67.20], abs=0.01)


@pytest.mark.parametrize(
    ("objects", "told"),
    [
        ("dog", "are 'dog'; expected a list of objects"),
        ([{"count": 2}], "expected an object with a label"),
        ([{"label": "dog", "colour": "red"}], "the key 'colour'.*Did you mean 'color'"),
        ([{"label": "dog", "count": 0}], "the count 0; expected a whole number from 1"),
        ([{"label": "dog", "position": "above"}], "the position 'above'; expected one of left, right"),
    ],
)
def test_malformed_objects_are_refused_by_record(objects: Any, told: str) -> None:
    reward, good = ObjectLayout(detector=f"{HERE}:squares"), asking({"label": "dog"})
    reward.check_records([good, PromptRecord(id="n", prompt="")])
    with pytest.raises(UserError, match=f"record 'o': its metadata objects .*{told}"):
        reward.check_records([good, replace(good, metadata={"objects": objects})])


@pytest.mark.parametrize("kind", range(4))
def test_what_a_detector_may_not_return(kind: int) -> None:
    reward, image = ObjectLayout(detector=f"{HERE}:rubbish"), torch.full((3, 4, 4), kind, dtype=torch.uint8)
    with pytest.raises(UserError, match=r"the detector must return a list of \(label, \(top, left, bottom, right\)"):
        reward([asking({"label": "dog"})], [image])
