"""Drawn shapes: their properties, and that drawing is deterministic."""

from __future__ import annotations

import random

import numpy as np

from visual_grpo.starter.shapes.draw import draw
from visual_grpo.starter.shapes.world import BACKGROUND, COLORS, COMBINATIONS


def test_shapes_are_whole_flat_and_anti_aliased() -> None:
    for combination in COMBINATIONS:
        pixels = np.asarray(draw(combination, 128, 128, random.Random(0)))
        rim = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        assert (rim == BACKGROUND).all(), combination
        flat = (pixels == BACKGROUND).all(-1) | (pixels == COLORS[combination.color]).all(-1)
        assert 0.95 < flat.mean() < 1, combination
