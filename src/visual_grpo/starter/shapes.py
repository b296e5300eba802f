"""Draws single flat shapes on a dark background, each one a little off its nominal place and size."""

from __future__ import annotations

import random

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from visual_grpo.shapes_world import BACKGROUND, CENTERS, COLORS, COMBINATIONS, RADII, Combination

CENTER_JITTER = 0.012
"""Largest shift of a centre along each axis, as a share of the shorter side."""
SCALE_JITTER = (0.97, 1.03)
_SUPERSAMPLING = 4


def draw(combination: Combination, height: int, width: int, rng: random.Random) -> Image.Image:
    """One anti-aliased RGB image of ``height`` x ``width`` pixels."""
    scale = _SUPERSAMPLING
    short = min(height, width) * scale
    center_x, center_y = CENTERS[combination.position]
    x = center_x * width * scale + rng.uniform(-CENTER_JITTER, CENTER_JITTER) * short
    y = center_y * height * scale + rng.uniform(-CENTER_JITTER, CENTER_JITTER) * short
    radius = RADII[combination.size] * rng.uniform(*SCALE_JITTER) * short
    canvas = Image.new("RGB", (width * scale, height * scale), BACKGROUND)
    _fill(ImageDraw.Draw(canvas), combination, x, y, radius)
    return canvas.reduce(scale)


def draw_all(images_per_combination: int, height: int, width: int, seed: int) -> Tensor:
    """uint8 [combinations, images_per_combination, 3, height, width]; row i shows ``COMBINATIONS[i]``."""
    rng = random.Random(seed)
    images = [
        np.asarray(draw(combination, height, width, rng))
        for combination in COMBINATIONS
        for _ in range(images_per_combination)
    ]
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
    return pixels.view(len(COMBINATIONS), images_per_combination, 3, height, width)


def _fill(brush: ImageDraw.ImageDraw, combination: Combination, x: float, y: float, radius: float) -> None:
    color = COLORS[combination.color]
    left, top, right, bottom = x - radius, y - radius, x + radius, y + radius
    if combination.shape == "circle":
        brush.ellipse((left, top, right, bottom), fill=color)
    elif combination.shape == "square":
        brush.rectangle((left, top, right, bottom), fill=color)
    else:
        brush.polygon([(x, top), (left, bottom), (right, bottom)], fill=color)
