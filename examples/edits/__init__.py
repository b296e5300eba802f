"""Edits of the demo's shapes, by a small FLUX.1 Kontext."""

from __future__ import annotations

from dataclasses import replace

from visual_grpo.starter.worlds import SHAPES, SmallModel

WORLD = replace(
    SHAPES,
    models={"flux_kontext": SmallModel(pretrain={"examples.edits.pretrain_kontext:pretrain_kontext": ("vae", "dit")})},
)
