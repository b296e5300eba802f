from __future__ import annotations

import pytest
import torch

from visual_grpo.errors import UserError
from visual_grpo.segmentation.geometry import box_of, inner_points


def block(x1: int, y1: int, x2: int, y2: int, height: int = 20, width: int = 30) -> torch.Tensor:
    """A rectangle with inclusive corners."""
    mask = torch.zeros(height, width, dtype=torch.bool)
    mask[y1 : y2 + 1, x1 : x2 + 1] = True
    return mask


def test_box_corners_are_inclusive() -> None:
    assert box_of(block(3, 5, 12, 7)) == (3, 5, 12, 7)
    assert box_of(block(4, 9, 4, 9)) == (4, 9, 4, 9)


def test_the_first_point_is_the_deepest_and_the_next_are_far_from_it_but_deep() -> None:
    disc_with_tail = block(2, 4, 10, 12) | block(11, 8, 28, 8)
    assert inner_points(disc_with_tail, 1) == [(6, 8)]
    bar = block(2, 4, 22, 8)
    assert inner_points(bar, 3) == [(4, 6), (21, 5), (13, 7)]
    assert sorted(inner_points(block(5, 5, 6, 5), 4)) == [(5, 5), (6, 5)], "fewer than asked for"
    assert inner_points(torch.ones(7, 11, dtype=torch.bool), 1)[0][1] == 3, "the edge of the image is outside"


def test_an_empty_mask_is_refused() -> None:
    empty = torch.zeros(20, 30, dtype=torch.bool)
    for call in (lambda: box_of(empty), lambda: inner_points(empty, 1)):
        with pytest.raises(UserError, match="one of 30 x 20 pixels"):
            call()
