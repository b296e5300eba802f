"""Boxes and points: which are accepted, and their positions on the stretched image."""

from __future__ import annotations

import math

import pytest

from visual_grpo.records.coordinates import box_from, points_from, stretched_box, stretched_points
from visual_grpo.records.raw import Rejected


def test_pixel_centres_stay_where_they_are_on_the_picture():
    """80 x 40 to 160 x 20: the first pixel's centre is .5 from the edge, so 1 wide pixel in: .5 * 2 - .5."""
    to = {"size": (80, 40), "to": (160, 20)}
    assert stretched_points(((0, 0), (79, 39), (39.5, 19.5)), **to) == [(0.5, -0.25), (158.5, 19.25), (79.5, 9.5)]
    assert stretched_box((10, 4, 19, 7), **to) == (20.5, 1.75, 38.5, 3.25)


def test_stretching_to_the_same_size_changes_nothing():
    assert stretched_box((0, 1, 7, 9), (8, 10), (8, 10)) == (0, 1, 7, 9)
    assert stretched_points(((0.25, 9.5),), (8, 10), (8, 10)) == [(0.25, 9.5)]


def test_a_box_that_ends_at_the_width_means_the_last_pixel():
    assert stretched_box((0, 0, 8, 10), (8, 10), (8, 10)) == (0, 0, 7, 9)


@pytest.mark.parametrize("point", [(-1, 0), (0, -1), (8, 0), (0, 10), (math.inf, 0)])
def test_a_point_outside_is_rejected(point):
    with pytest.raises(Rejected, match=r"points: .* lies outside the image of 8x10 pixels") as rejected:
        stretched_points(((1, 1), point), (8, 10), (16, 16))
    assert rejected.value.reason == "wrong_points"


@pytest.mark.parametrize("box", [(-1, 0, 3, 3), (0, -1, 3, 3), (0, 0, 8.5, 3), (0, 0, 3, 10.5), (9, 0, 9, 0)])
def test_a_box_outside_is_rejected(box):
    with pytest.raises(Rejected, match=r"box: .* lies outside the image of 8x10 pixels") as rejected:
        stretched_box(box, (8, 10), (16, 16))
    assert rejected.value.reason == "wrong_box"


def test_values_of_the_right_shape():
    assert box_from([1, 2.5, 1, 4]) == (1.0, 2.5, 1.0, 4.0)
    assert points_from([[1, 2], (3, 4.5)]) == ((1.0, 2.0), (3.0, 4.5))


@pytest.mark.parametrize(
    "value",
    [5, "1,2,3,4", [1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, "4"], [1, 2, 3, None], [1, 2, 3, True], [[1, 2, 3, 4]]],
)
def test_values_that_are_not_a_box_are_rejected(value):
    with pytest.raises(Rejected, match=r"box must be \[x1, y1, x2, y2\], four numbers in pixels, got "):
        box_from(value)


@pytest.mark.parametrize("value", [[1, 2, 3, math.nan], [1, 2, 3, math.inf], [1, 2, 3, 10**400]])
def test_numbers_that_are_not_finite(value):
    with pytest.raises(Rejected, match="box must be"):
        box_from(value)


@pytest.mark.parametrize("value", [[3, 0, 2, 5], [0, 5, 2, 4]])
def test_a_box_with_swapped_corners_is_rejected(value):
    with pytest.raises(Rejected, match="ends before it begins") as rejected:
        box_from(value)
    assert rejected.value.reason == "wrong_box"


@pytest.mark.parametrize("value", [5, "a", [], [1, 2], [[1, 2, 3]], [[1, 2], [3]], [[1, 2], [3, "4"]], [None]])
def test_values_that_are_not_points_are_rejected(value):
    with pytest.raises(Rejected, match=r"points must be \[\[x, y\], \.\.\.\], a list of pairs"):
        points_from(value)
