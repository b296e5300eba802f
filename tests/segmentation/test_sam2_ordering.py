"""A trained SAM 2 as a segmenter: the same four-way ordering as with the watershed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.segmentation.ordering import Case, assert_ordered
from tests.segmentation.trained_sam2 import draw_discs, pick, save_trained_sam2
from visual_grpo.segmentation.sam2 import Sam2Segmenter
from visual_grpo.segmentation.segmenter import Point


def points_in(mask: Tensor, count: int, generator: torch.Generator) -> list[Point]:
    return [(x, y) for x, y in pick(mask[None], count, generator)[0].tolist()]


@pytest.mark.slow
def test_a_negative_point_helps_on_the_confused_part_and_hurts_inside_the_object(tmp_path: Path) -> None:
    """Tested on scenes that are not in the training data."""
    generator = torch.Generator().manual_seed(99)
    cases = [
        Case(
            image,
            target,
            positives=tuple(points_in(target, 1, generator)),
            right=points_in(other, 8, generator),
            random=points_in(torch.ones_like(target), 32, generator),
            wrong=points_in(target, 8, generator),
        )
        for image, target, other in zip(*draw_discs(64, generator), strict=True)
    ]
    assert_ordered(Sam2Segmenter(str(save_trained_sam2(tmp_path)), device="cpu"), cases)
