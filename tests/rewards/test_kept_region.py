"""Fidelity outside an edited region."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.images import to_pil
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.rewards.target import KeptRegion
from visual_grpo.types import PromptRecord

UPPER_LEFT = [[0, 0, 0.5, 0.5]]


def flat(value: int) -> Tensor:
    return torch.full((3, 8, 10), value, dtype=torch.uint8)


@pytest.fixture
def edit(tmp_path: Path) -> PromptRecord:
    to_pil(flat(51)).save(tmp_path / "source.png")
    return PromptRecord(
        id="e", prompt="edit", source_images=(tmp_path / "source.png",), metadata={"region": UPPER_LEFT}
    )


def scored(record: PromptRecord, sample: Tensor, **metadata: Any) -> float:
    return KeptRegion()([replace(record, metadata=metadata or record.metadata)], [sample]).item()


def test_what_changes_inside_the_boxes_does_not_count(edit: PromptRecord) -> None:
    inside = flat(51)
    inside[:, :4, :5] = 255
    assert scored(edit, inside) == 1
    inside[:, 4, 0] = 255  # one pixel of the 60 outside
    assert scored(edit, inside) == pytest.approx(1 - 0.8**2 / 60)
    assert scored(edit, flat(0)) == pytest.approx(1 - 0.2**2)


def test_boxes_add_up_and_a_pixel_is_where_its_centre_is(edit: PromptRecord) -> None:
    lower = flat(51)
    lower[:, 4:] = 0
    assert scored(edit, lower, region=[[0.5, 0, 1, 1]]) == 1
    assert scored(edit, lower, region=[[0.56, 0, 1, 0.5], [0.5, 0.5, 1, 1]]) == 1, "row 4 has its centre at 0.5625"
    assert scored(edit, lower, region=[[0.57, 0, 1, 1]]) == pytest.approx(1 - 0.2**2 / 5)


def test_without_a_region_or_without_an_outside_a_record_is_unscored(edit: PromptRecord) -> None:
    values = KeptRegion()([edit, replace(edit, id="n", metadata={}), edit], [flat(51)] * 3)
    assert values.isnan().tolist() == [False, True, False]
    assert math.isnan(scored(edit, flat(0), region=[[0, 0, 1, 0.5], [0, 0.5, 1, 1]])), "all is edited"


@pytest.mark.parametrize(
    "region",
    [
        [0, 0, 0.5, 0.5],
        [],
        "upper left",
        [[0, 0, 0.5]],
        [[0.5, 0, 0.5, 1]],
        [[0, 0, 0.5, "1"]],
        [[0, 0, 0.5, True]],
        [[0, 0, float("nan"), 1]],
    ],
)
def test_malformed_boxes_are_refused_by_record(edit: PromptRecord, region: Any) -> None:
    with pytest.raises(UserError, match=r"record 'e' has metadata region .*; expected a list of boxes \[top, left"):
        RewardSet({"kept": (KeptRegion(), 1.0)}).check_records([edit, replace(edit, metadata={"region": region})])


def test_records_that_cannot_be_judged_are_refused(edit: PromptRecord) -> None:
    rewards = RewardSet({"kept": (KeptRegion(), 1.0)})
    rewards.check_records([edit, replace(edit, metadata={})])
    with pytest.raises(UserError, match="record 'e' has a region but no source_image"):
        rewards.check_records([replace(edit, source_images=())])
    with pytest.raises(UserError, match=r"is \[3, 8, 10\] and the sample \[3, 8, 8\]"):
        KeptRegion()([edit], [flat(0)[:, :, :8]])
