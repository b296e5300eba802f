"""The terms of the negative-points reward, as functions of points, boxes and masks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from visual_grpo.common.geometry import Box, Point

_CANVAS = 840
"""Side in pixels of Seg-Zero's images, to which its thresholds refer."""
_BOX_IOU, _BOX_L1, _POINT_L1 = 0.5, 10 / _CANVAS, 100 / _CANVAS
"""Seg-Zero's thresholds (arXiv 2503.06520), distances as shares of an image's side."""


def placement(negatives: Sequence[Point], confused: Tensor, truth: Tensor) -> float:
    """Share of the negatives inside ``confused`` minus share inside ``truth`` (bool [H, W]), -1..1.

    If ``confused`` is empty, no negative is needed: no negatives score 1, and any score minus their share in the truth.
    """
    if not confused.any() and not negatives:
        return 1.0
    if not negatives:
        return 0.0
    return _share(negatives, confused) - _share(negatives, truth)


def spaced(negatives: Sequence[Point], cap: int, spacing: float) -> tuple[Point, ...]:
    """The first ``cap`` negatives, skipping those closer than ``spacing`` pixels to one that was kept before."""
    kept: list[Point] = []
    for point in negatives:
        if len(kept) < cap and all(math.dist(point, other) >= spacing for other in kept):
            kept.append(point)
    return tuple(kept)


def number(negatives: Sequence[Point], kept: Sequence[Point]) -> float:
    """Minus the share of the negatives that were dropped as too many or too close, -1..0."""
    return (len(kept) - len(negatives)) / max(len(negatives), 1)


def box_term(box: Box, truth: Box, size: tuple[int, int]) -> float:
    """Seg-Zero's box term: 0.5 for an IoU above 0.5, plus 0.5 for a mean L1 distance below 10 of 840 pixels."""
    sides = (size[1], size[0]) * 2
    distance = sum(abs(a - b) / side for a, b, side in zip(box, truth, sides, strict=True)) / len(sides)
    return (int(_box_iou(box, truth) > _BOX_IOU) + int(distance < _BOX_L1)) / 2


def points_term(points: Sequence[Point], truth_points: Sequence[Point], truth: Box, size: tuple[int, int]) -> float:
    """Seg-Zero's point term: 1 if all points are in the true box and their mean distance to the nearest true point is
    below 100 of 840 pixels, else 0."""
    inside = all(truth[0] <= x <= truth[2] and truth[1] <= y <= truth[3] for x, y in points)
    scaled = [(x / size[1], y / size[0]) for x, y in truth_points]
    distances = [min(math.dist((x / size[1], y / size[0]), other) for other in scaled) for x, y in points]
    return float(inside and sum(distances) / len(distances) < _POINT_L1)


def _share(points: Sequence[Point], mask: Tensor) -> float:
    return sum(bool(mask[_pixel(y, mask.shape[0]), _pixel(x, mask.shape[1])]) for x, y in points) / len(points)


def _pixel(value: float, side: int) -> int:
    return min(max(round(value), 0), side - 1)


def _box_iou(a: Box, b: Box) -> float:
    """IoU of boxes with inclusive corners."""
    overlap = _area(max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3]))
    return overlap / (_area(*a) + _area(*b) - overlap)


def _area(x1: float, y1: float, x2: float, y2: float) -> float:
    return max(x2 - x1 + 1, 0.0) * max(y2 - y1 + 1, 0.0)
