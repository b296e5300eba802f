"""Drawn shapes: their properties, and that drawing is deterministic."""

from __future__ import annotations

import random

import numpy as np
import torch

from visual_grpo.starter.shapes.draw import draw, draw_all
from visual_grpo.starter.shapes.world import BACKGROUND, COLORS, COMBINATIONS


def test_the_seed_decides_the_pictures() -> None:
    first, again, other = (draw_all(2, 64, 96, seed) for seed in (1, 1, 2))
    assert first.shape == (150, 2, 3, 64, 96)
    assert first.dtype == torch.uint8
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[:, 0], first[:, 1])


def test_shapes_are_whole_flat_and_anti_aliased() -> None:
    for combination in COMBINATIONS:
        pixels = np.asarray(draw(combination, 128, 128, random.Random(0)))
        rim = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        assert (rim == BACKGROUND).all(), combination
        flat = (pixels == BACKGROUND).all(-1) | (pixels == COLORS[combination.color]).all(-1)
        assert 0.95 < flat.mean() < 1, combination
