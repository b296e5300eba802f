"""A FluxPipeline or FluxKontextPipeline of the real classes, small and with random weights."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.families.sd3 import tiny as sd3


def pipeline(*, schnell: bool = False, kontext: bool = False) -> Any:
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        FluxKontextPipeline,
        FluxPipeline,
        FluxTransformer2DModel,
    )
    from transformers import CLIPTextModel

    torch.set_num_threads(1)
    text_encoder = CLIPTextModel(sd3.clip(1, 32).config)
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        in_channels=64,
        num_layers=2,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=64,
        pooled_projection_dim=32,
        guidance_embeds=not schnell,
        axes_dims_rope=(4, 6, 6),
    )
    return sd3.frozen(
        (FluxKontextPipeline if kontext else FluxPipeline)(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0 if schnell else 3.0, use_dynamic_shifting=not schnell),
            vae=sd3.vae(),
            text_encoder=text_encoder,
            tokenizer=sd3.clip_tokenizer(),
            text_encoder_2=sd3.t5_encoder(),
            tokenizer_2=sd3.t5_tokenizer(),
            transformer=transformer,
        )
    )
