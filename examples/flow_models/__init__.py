"""The demo's shapes, rendered by a small Stable Diffusion 3, FLUX.1 or Z-Image."""

from __future__ import annotations

from dataclasses import replace

from visual_grpo.config.presets import Preset
from visual_grpo.starter.worlds import SHAPES, SmallModel

_MODELS = "examples.flow_models.models"
WORLD = replace(
    SHAPES,
    preset=Preset(rewards=SHAPES.preset.rewards),  # Not the weights of GLM-Image's decoder.
    models={
        "sd3": SmallModel(pretrain={f"{_MODELS}:pretrain_sd3": ("vae", "dit")}),
        "flux": SmallModel(pretrain={f"{_MODELS}:pretrain_flux": ("vae", "dit")}),
        "z_image": SmallModel(pretrain={f"{_MODELS}:pretrain_z_image": ("vae", "dit")}),
    },
)
