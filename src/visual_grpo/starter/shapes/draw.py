"""Draws flat shapes on a dark background, with a small jitter of position and size."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from visual_grpo.starter.shapes.world import BACKGROUND, CENTERS, COLORS, COMBINATIONS, RADII, Combination

CENTER_JITTER = 0.012
"""Largest shift of a centre along each axis, as a share of the shorter side."""
SCALE_JITTER = (0.97, 1.03)
_SUPERSAMPLING = 4


@dataclass(frozen=True, kw_only=True)
class Jitter:
    """The deviation of a drawn object from its nominal position and size."""

    dx: float
    """Share of the shorter side."""
    dy: float
    """Share of the shorter side."""
    scale: float
    """Factor on the radius."""

    @classmethod
    def draw(cls, rng: random.Random) -> Jitter:
        dx, dy = (rng.uniform(-CENTER_JITTER, CENTER_JITTER) for _ in range(2))
        return cls(dx=dx, dy=dy, scale=rng.uniform(*SCALE_JITTER))


def draw(combination: Combination, height: int, width: int, rng: random.Random) -> Image.Image:
    """One anti-aliased RGB image of ``height`` x ``width`` pixels."""
    return draw_scene([(combination, Jitter.draw(rng))], height, width)


def draw_scene(objects: Iterable[tuple[Combination, Jitter]], height: int, width: int) -> Image.Image:
    """Like `draw`, with any number of objects, each with its jitter."""
    scale = _SUPERSAMPLING
    short = min(height, width) * scale
    canvas = Image.new("RGB", (width * scale, height * scale), BACKGROUND)
    for combination, jitter in objects:
        center_x, center_y = CENTERS[combination.position]
        x = center_x * width * scale + jitter.dx * short
        y = center_y * height * scale + jitter.dy * short
        _fill(ImageDraw.Draw(canvas), combination, x, y, RADII[combination.size] * jitter.scale * short)
    return canvas.reduce(scale)


def draw_all(images_per_combination: int, height: int, width: int, seed: int) -> Tensor:
    """uint8 [combinations, images_per_combination, 3, height, width]; row i shows ``COMBINATIONS[i]``."""
    rng = random.Random(seed)
    images = [
        draw(combination, height, width, rng) for combination in COMBINATIONS for _ in range(images_per_combination)
    ]
    return stacked(images).unflatten(0, (len(COMBINATIONS), images_per_combination))


def stacked(images: Sequence[Image.Image]) -> Tensor:
    """Stacks images of the same size to uint8 [N, 3, height, width]."""
    return torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2).contiguous()


def _fill(brush: ImageDraw.ImageDraw, combination: Combination, x: float, y: float, radius: float) -> None:
    color = COLORS[combination.color]
    left, top, right, bottom = x - radius, y - radius, x + radius, y + radius
    if combination.shape == "circle":
        brush.ellipse((left, top, right, bottom), fill=color)
    elif combination.shape == "square":
        brush.rectangle((left, top, right, bottom), fill=color)
    else:
        brush.polygon([(x, top), (left, bottom), (right, bottom)], fill=color)
