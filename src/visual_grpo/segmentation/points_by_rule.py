"""Rules that place random negative points: to inspect as labels, and to pretrain a small policy on.

Every rule takes the true mask (bool [H, W]) and returns (x, y) of at most ``count`` random pixels outside it, at least
``spacing`` pixels apart; fewer if there are not enough candidates.
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
    """Around the object: in its box extended by ``margin`` pixels on every side. Defaults are for 840 px images."""
    height, width = truth.shape
    x, y = torch.arange(width), torch.arange(height)
    x1, y1, x2, y2 = box
    columns = (x >= x1 - margin) & (x <= x2 + margin)
    rows = (y >= y1 - margin) & (y <= y2 + margin)
    return _draw(rows[:, None] & columns & ~truth, count, generator, spacing)


def edge(truth: Tensor, count: int, generator: Generator, *, width: float = 5, spacing: float = 20) -> list[Pixel]:
    """Along the object's border, where a mask is most likely to spill over: at most ``width`` pixels outside it."""
    if not truth.any():
        return []
    away = torch.from_numpy(distances_to_false(~truth.cpu().numpy()))
    return _draw((away > 0) & (away <= width), count, generator, spacing)


def multimask(
    truth: Tensor, masks: Tensor, scores: Tensor, count: int, generator: Generator, *, spacing: float = 20
) -> list[Pixel]:
    """Where a segmenter is uncertain: in its alternative masks for one prompt, all but the best one.

    Args:
        masks: bool [M, H, W].
        scores: [M], highest for the best mask.
    """
    others = torch.arange(len(masks)) != scores.argmax()
    return _draw(masks[others].any(0) & ~truth, count, generator, spacing)


def _draw(allowed: Tensor, count: int, generator: Generator, spacing: float) -> list[Pixel]:
    """Draws random pixels of ``allowed`` (bool [H, W]) one by one, each far enough from the previous ones."""
    left = allowed.nonzero().flip(1)
    points: list[Pixel] = []
    while len(points) < count and len(left):
        point = left[torch.randint(len(left), (), generator=generator)]
        points.append((int(point[0]), int(point[1])))
        distance = (left - point).square().sum(1)
        left = left[(distance > 0) & (distance >= spacing**2)]
    return points
