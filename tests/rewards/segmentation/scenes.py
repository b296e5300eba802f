"""A dark picture of one object in two parts of slightly different shade, and a slow reference watershed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Scene(NamedTuple):
    image: Tensor
    """uint8 [3, H, W]."""
    target: Tensor
    """bool [H, W]: one part."""
    other: Tensor
    """bool [H, W]: the other part."""


def draw_scene(generator: torch.Generator, height: int = 48, width: int = 64) -> Scene:
    """Two touching ellipses; the colour step between them is below, that to the ground above 0.3 (L2 of 0..1)."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    radius = 8 + 3 * torch.rand(2, generator=generator)
    angle = 6.283 * torch.rand(1, generator=generator)
    middle = torch.tensor([width / 2, height / 2]) + 4 * torch.rand(2, generator=generator) - 2
    step = torch.cat([angle.cos(), angle.sin()]) * radius.sum() * 0.46
    (x1, y1), (x2, y2) = (middle - step).tolist(), (middle + step).tolist()
    target = ((x - x1) ** 2 + (y - y1) ** 2) <= radius[0] ** 2
    other = (((x - x2) ** 2 + (y - y2) ** 2) <= radius[1] ** 2) & ~target
    image = torch.full((3, height, width), 0.08)
    colour = 0.4 + 0.4 * torch.rand(3, 1, generator=generator)
    image[:, target], image[:, other] = colour, colour + 0.1
    image += 0.004 * torch.randn(image.shape, generator=generator)
    return Scene((image.clamp(0, 1) * 255).to(torch.uint8), target, other)


def minimax(image: Tensor, x: int, y: int) -> Tensor:
    """int64 [H, W]: smallest maximum squared colour edge on a path to pixel (x, y), by relaxation to a fixed point."""
    colours = image.long()
    beside = (colours[:, :, 1:] - colours[:, :, :-1]).square().sum(0)
    below = (colours[:, 1:] - colours[:, :-1]).square().sum(0)
    least = torch.full(image.shape[1:], 10**9)
    least[y, x] = 0
    while True:
        before = least.clone()
        least[:, 1:] = torch.minimum(least[:, 1:], torch.maximum(before[:, :-1], beside))
        least[:, :-1] = torch.minimum(least[:, :-1], torch.maximum(before[:, 1:], beside))
        least[1:] = torch.minimum(least[1:], torch.maximum(before[:-1], below))
        least[:-1] = torch.minimum(least[:-1], torch.maximum(before[1:], below))
        if torch.equal(before, least):
            return least
