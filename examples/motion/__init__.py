"""Shapes that move as their prompts say, in videos of a small Wan 2.1."""

from __future__ import annotations

from visual_grpo.config.presets import Preset
from visual_grpo.starter.worlds import SmallModel, World

WORLD = World(
    name="motion",
    tasks=("t2i",),
    render="examples.motion.clips:draw_dataset",
    models={"wan": SmallModel(pretrain={"examples.motion.pretrain_wan:pretrain_wan": ("vae", "dit")})},
    preset=Preset(
        rewards={
            "moving_shapes": {"function": "examples.motion.moving_shapes:MovingShapeReward", "weight": 1.0},
            "motion": {"weight": 0.0},
            "flicker": {"weight": 0.0},
            "delta_e": {"judge": True, "frames": "all"},
        }
    ),
)
