"""Negative points that could be asked of a policy: to look at, and to warm a small policy up with.

Every generator takes the truth (bool [H, W]), how many points at most, how far apart, and a generator; and gives (x, y)
of pixels outside the truth: fewer where there is no room, none where there is no such pixel. Two pixels at least
``spacing`` apart may both be drawn.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from visual_grpo.segmentation.geometry import distances_to_false
from visual_grpo.segmentation.segmenter import Box

Pixel = tuple[int, int]
"""(x, y)"""


def ring(
    truth: Tensor, box: Box, count: int, generator: Generator, *, margin: float = 50, spacing: float = 20
) -> list[Pixel]:
    """Around the object: in its box grown by ``margin`` pixels on every side. The defaults are for sides of 840 px."""
    height, width = truth.shape
    x, y = torch.arange(width), torch.arange(height)
    x1, y1, x2, y2 = box
    columns = (x >= x1 - margin) & (x <= x2 + margin)
    rows = (y >= y1 - margin) & (y <= y2 + margin)
    return _draw(rows[:, None] & columns & ~truth, count, generator, spacing)


def edge(truth: Tensor, count: int, generator: Generator, *, width: float = 5, spacing: float = 20) -> list[Pixel]:
    """Where a mask is likeliest to run over: at most ``width`` pixels from the object."""
    if not truth.any():
        return []
    away = torch.from_numpy(distances_to_false(~truth.cpu().numpy()))
    return _draw((away > 0) & (away <= width), count, generator, spacing)


def multimask(
    truth: Tensor, masks: Tensor, scores: Tensor, count: int, generator: Generator, *, spacing: float = 20
) -> list[Pixel]:
    """Where a segmenter is in doubt: in the masks that it gives for one prompt, without the best of them.

    Args:
        masks: bool [M, H, W].
        scores: [M], the best one highest.
    """
    others = torch.arange(len(masks)) != scores.argmax()
    return _draw(masks[others].any(0) & ~truth, count, generator, spacing)


def _draw(allowed: Tensor, count: int, generator: Generator, spacing: float) -> list[Pixel]:
    """Random pixels of ``allowed`` (bool [H, W]), each of those that are left by the points before it."""
    left = allowed.nonzero().flip(1)
    points: list[Pixel] = []
    while len(points) < count and len(left):
        point = left[torch.randint(len(left), (), generator=generator)]
        points.append((int(point[0]), int(point[1])))
        distance = (left - point).square().sum(1)
        left = left[(distance > 0) & (distance >= spacing**2)]
    return points
