"""A mask's box and inner points."""

from __future__ import annotations

import pytest
import torch

from visual_grpo.errors import UserError
from visual_grpo.segmentation.geometry import box_of, inner_points


def mask(height, width, *rectangles):
    found = torch.zeros(height, width, dtype=torch.bool)
    for x1, y1, x2, y2 in rectangles:
        found[y1 : y2 + 1, x1 : x2 + 1] = True
    return found


def test_the_box_has_its_corners_inside():
    assert box_of(mask(10, 20, (3, 2, 6, 4), (12, 8, 12, 8))) == (3, 2, 12, 8)
    assert box_of(mask(10, 20, (19, 9, 19, 9))) == (19, 9, 19, 9)


def test_the_first_point_is_the_deepest_and_the_second_far_from_it():
    two = mask(20, 40, (2, 3, 8, 9), (20, 4, 24, 8))
    assert inner_points(two, 2) == [(5, 6), (22, 6)]


def test_beyond_the_image_is_outside():
    assert inner_points(torch.ones(5, 9, dtype=torch.bool), 1)[0][1] == 2


def test_no_more_points_than_pixels():
    assert inner_points(mask(5, 5, (2, 3, 2, 3)), 3) == [(2, 3)]


def test_an_empty_mask_is_refused():
    for function in (box_of, lambda m: inner_points(m, 1)):
        with pytest.raises(UserError, match="7x5 pixels is empty"):
            function(mask(5, 7))
