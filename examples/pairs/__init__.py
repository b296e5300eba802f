"""Edits of two sources, by a small FLUX.2 klein."""

from __future__ import annotations

from visual_grpo.config.presets import Preset
from visual_grpo.starter.worlds import SHAPES, SmallModel, World

WORLD = World(
    name="pairs",
    tasks=("i2i",),
    render="examples.pairs.edits:draw_dataset",
    models={"flux2_klein": SmallModel(pretrain={"examples.pairs.pretrain_klein:pretrain_klein": ("vae", "dit")})},
    preset=Preset(rewards=SHAPES.preset.rewards),
)
