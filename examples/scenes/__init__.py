"""Scenes with parts to find, for a small Qwen2.5-VL that places negative points for a segmenter."""

from __future__ import annotations

from visual_grpo.config.presets import Preset
from visual_grpo.starter.worlds import SmallModel, World

WORLD = World(
    name="scenes",
    tasks=("segmentation",),
    render="examples.scenes.scenes:draw_scene_records",
    models={"qwen2_5_vl": SmallModel(pretrain={"examples.scenes.pretrain_vl:pretrain_vl": ("vl",)})},
    preset=Preset(rewards={"negative_points": {"weight": 1.0}}),
)
