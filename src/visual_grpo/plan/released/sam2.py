"""SAM 2.1 with the large Hiera backbone (facebook/sam2.1-hiera-large): sizes of its published configuration file."""

from __future__ import annotations

from typing import Any

import torch

from visual_grpo.plan.released.weightless import frozen

LARGE = "facebook/sam2.1-hiera-large"


def build(dtype: torch.dtype) -> tuple[Any, Any]:
    """Model and processor."""
    from transformers import Sam2Config, Sam2ImageProcessor, Sam2Model, Sam2Processor

    backbone = {
        "model_type": "sam2_hiera_det_model",
        "hidden_size": 144,
        "num_attention_heads": 2,
        "blocks_per_stage": [2, 6, 36, 4],
        "embed_dim_per_stage": [144, 288, 576, 1152],
        "num_attention_heads_per_stage": [2, 4, 8, 16],
        "window_size_per_stage": [8, 4, 16, 8],
        "global_attention_blocks": [23, 33, 43],
    }
    vision = {
        "model_type": "sam2_vision_model",
        "backbone_config": backbone,
        "backbone_channel_list": [1152, 576, 288, 144],
    }
    model = frozen(lambda: Sam2Model(Sam2Config(vision_config=vision)), dtype)
    return model, Sam2Processor(Sam2ImageProcessor())
