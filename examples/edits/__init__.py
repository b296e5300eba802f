"""Edits of the demo's shapes, by a small FLUX.1 Kontext."""

from __future__ import annotations

from dataclasses import replace

from visual_grpo.config.presets import Preset
from visual_grpo.starter.worlds import SHAPES, SmallModel

WORLD = replace(
    SHAPES,
    preset=Preset(rewards=SHAPES.preset.rewards),  # Not the weights of GLM-Image's decoder.
    models={"flux_kontext": SmallModel(pretrain={"examples.edits.pretrain_kontext:pretrain_kontext": ("vae", "dit")})},
)
