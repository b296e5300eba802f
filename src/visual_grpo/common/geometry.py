"""Geometry of masks (boxes, interior points, distances), and rules that place random negative points.

The rules make labels to inspect, and to pretrain a small policy on. Each takes the true mask (bool [H, W]) and returns
(x, y) of at most ``count`` random pixels outside it, at least ``spacing`` pixels apart; fewer if there are not enough.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.ndimage import distance_transform_edt
from torch import Generator, Tensor

from visual_grpo.common.errors import UserError

Point = tuple[float, float]
"""(x, y) in pixels of the image: (0, 0) is the centre of its first pixel."""
Box = tuple[float, float, float, float]
"""(x1, y1, x2, y2) in pixels, both corners inclusive."""
Pixel = tuple[int, int]
"""(x, y)"""


def box_of(mask: Tensor) -> Box:
    """The bounding box of a mask (bool [H, W]), both corners inclusive; raises UserError if it is empty."""
    _refuse_empty(mask)
    columns, rows = mask.any(0).nonzero(), mask.any(1).nonzero()
    return float(columns[0]), float(rows[0]), float(columns[-1]), float(rows[-1])


def inner_points(mask: Tensor, count: int) -> list[Point]:
    """Up to ``count`` points well inside a mask (bool [H, W]); raises UserError if it is empty.

    The first is the pixel farthest from the mask's border; what is outside the image counts as outside. Each further
    point is the pixel farthest from the previous ones among those at least half as deep. Fewer if there are no more.
    """
    _refuse_empty(mask)
    depth = distance_transform_edt(np.pad(mask.cpu().numpy(), 1))[1:-1, 1:-1]
    apart = np.full(depth.shape, np.inf)
    points: list[Point] = []
    while len(points) < count:
        deep = depth >= depth.max() / (2 if points else 1)
        left = np.where(deep, apart, 0)
        if not left.any():
            break
        y, x = np.unravel_index(left.argmax(), left.shape)
        points.append((float(x), float(y)))
        apart = np.minimum(apart, np.hypot(*np.ogrid[-y : depth.shape[0] - y, -x : depth.shape[1] - x]))
    return points


def _refuse_empty(mask: Tensor) -> None:
    if not mask.any():
        raise UserError(
            f"expected a mask with at least one foreground pixel, got an empty one of {mask.shape[-1]} x"
            f" {mask.shape[-2]} pixels; remove its record from the data"
        )


def ring(
    truth: Tensor, box: Box, count: int, generator: Generator, *, margin: float = 50, spacing: float = 20
) -> list[Pixel]:
    """Places points around the object: in its box extended by ``margin`` pixels. Defaults are for 840 px images."""
    height, width = truth.shape
    x, y = torch.arange(width), torch.arange(height)
    x1, y1, x2, y2 = box
    columns = (x >= x1 - margin) & (x <= x2 + margin)
    rows = (y >= y1 - margin) & (y <= y2 + margin)
    return _draw(rows[:, None] & columns & ~truth, count, generator, spacing)


def edge(truth: Tensor, count: int, generator: Generator, *, width: float = 5, spacing: float = 20) -> list[Pixel]:
    """Places points along the border, where masks often spill over: at most ``width`` pixels outside the object."""
    if not truth.any():
        return []
    away = torch.from_numpy(distance_transform_edt(~truth.cpu().numpy()))
    return _draw((away > 0) & (away <= width), count, generator, spacing)


def multimask(
    truth: Tensor, masks: Tensor, scores: Tensor, count: int, generator: Generator, *, spacing: float = 20
) -> list[Pixel]:
    """Places points in the segmenter's alternative masks for one prompt (bool [M, H, W]), without the one that has the
    highest of the scores [M]."""
    others = torch.arange(len(masks)) != scores.argmax()
    return _draw(masks[others].any(0) & ~truth, count, generator, spacing)


def _draw(allowed: Tensor, count: int, generator: Generator, spacing: float) -> list[Pixel]:
    """Samples random pixels of ``allowed`` (bool [H, W]) one by one, each far enough from the previous ones."""
    left = allowed.nonzero().flip(1)
    points: list[Pixel] = []
    while len(points) < count and len(left):
        point = left[torch.randint(len(left), (), generator=generator)]
        points.append((int(point[0]), int(point[1])))
        distance = (left - point).square().sum(1)
        left = left[(distance > 0) & (distance >= spacing**2)]
    return points
