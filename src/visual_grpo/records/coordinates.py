"""Checks a record's box and points and rescales them to the prepared image.

Coordinates are in pixels; (0, 0) is the centre of the first pixel.
"""

from __future__ import annotations

import math
from typing import Any

from visual_grpo.records.raw import Rejected, wrong_type
from visual_grpo.segmentation.segmenter import Box, Point

Size = tuple[int, int]
"""(width, height) in pixels."""


def box_from(value: Any) -> Box:
    """Parses ``[x1, y1, x2, y2]``.

    Raises:
        Rejected: any other value, or x2 < x1, or y2 < y1.
    """
    numbers = _numbers(value, 4)
    if numbers is None:
        raise wrong_type("box", "[x1, y1, x2, y2], four numbers in pixels", value)
    x1, y1, x2, y2 = numbers
    if x2 < x1 or y2 < y1:
        raise Rejected(
            "wrong_box",
            f"box {value} ends before it begins: x2 must not be less than x1, nor y2 than y1",
            "Give the corners as [x1, y1, x2, y2], not a width and height",
        )
    return x1, y1, x2, y2


def points_from(value: Any) -> tuple[Point, ...]:
    """Parses ``[[x, y], ...]``.

    Raises:
        Rejected: any other value, or an empty list.
    """
    pairs = [_numbers(point, 2) for point in value] if isinstance(value, list | tuple) else []
    points = tuple((pair[0], pair[1]) for pair in pairs if pair is not None)
    if not points or len(points) < len(pairs):
        raise wrong_type("points", "[[x, y], ...], a list of pairs of numbers in pixels", value)
    return points


def stretched_box(box: Box, size: Size, to: Size) -> Box:
    """Maps a box on an image of size ``size`` to the same image stretched to size ``to``.

    In many datasets a box may end at the image's width or height, one past the last pixel; it is clamped to that pixel.

    Raises:
        Rejected: a corner outside the image.
    """
    _check_inside("box", box[:2], size, beyond=1)
    _check_inside("box", box[2:], size, beyond=1)
    (left, top), (right, bottom) = (
        _stretched((min(x, size[0] - 1), min(y, size[1] - 1)), size, to) for x, y in (box[:2], box[2:])
    )
    return left, top, right, bottom


def stretched_points(points: tuple[Point, ...], size: Size, to: Size) -> list[Point]:
    """Like `stretched_box`, for points.

    Raises:
        Rejected: a point outside the image.
    """
    for point in points:
        _check_inside("points", point, size, beyond=0.5)
    return [_stretched(point, size, to) for point in points]


def _stretched(point: Point, size: Size, to: Size) -> Point:
    """Keeps the position relative to the image; the centre of the first pixel is half a pixel inside the edge."""
    (x, y), (width, height), (to_width, to_height) = point, size, to
    return (x + 0.5) * to_width / width - 0.5, (y + 0.5) * to_height / height - 0.5


def _check_inside(key: str, point: Point, size: Size, beyond: float) -> None:
    """``beyond``: how many pixels past the centre of the last pixel are still accepted."""
    x, y = point
    if not (-0.5 <= x <= size[0] - 1 + beyond and -0.5 <= y <= size[1] - 1 + beyond):
        raise Rejected(
            f"wrong_{key}",
            f"{key}: ({x:g}, {y:g}) lies outside the image of {size[0]}x{size[1]} pixels",
            "Give absolute pixels of the upright image at its own size",
        )


def _numbers(value: Any, count: int) -> list[float] | None:
    """The value as ``count`` finite floats; None if it is anything else."""
    if not isinstance(value, list | tuple) or len(value) != count:
        return None
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in value):
        return None
    try:
        numbers = [float(number) for number in value]
    except OverflowError:
        return None
    return numbers if all(map(math.isfinite, numbers)) else None
