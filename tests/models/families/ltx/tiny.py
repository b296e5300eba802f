"""An LTXPipeline of the real classes, small and with random weights."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.families.sd3 import tiny as sd3

FRAMES = 17


def pipeline(*, timestep_conditioning: bool = False) -> Any:
    """As LTX-Video 0.9.0 is saved: noise levels shifted by the number of tokens, the last but one at 0.1."""
    from diffusers import (
        AutoencoderKLLTXVideo,
        FlowMatchEulerDiscreteScheduler,
        LTXPipeline,
        LTXVideoTransformer3DModel,
    )

    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformer = LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=64,
    )
    widths = {"block_out_channels": (4, 4, 4, 4), "decoder_block_out_channels": (4, 4, 4, 4)}
    layers = {"layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 5}
    vae = AutoencoderKLLTXVideo(latent_channels=8, timestep_conditioning=timestep_conditioning, **widths, **layers)
    vae.latents_mean.copy_(torch.linspace(-0.3, 0.4, 8))
    vae.latents_std.copy_(torch.linspace(0.7, 1.4, 8))
    shift = {"base_shift": 0.95, "max_shift": 2.05, "base_image_seq_len": 1024, "max_image_seq_len": 4096}
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.1, **shift)
    return sd3.frozen(
        LTXPipeline(
            tokenizer=sd3.t5_tokenizer(),
            text_encoder=sd3.t5_encoder(),
            vae=vae,
            scheduler=scheduler,
            transformer=transformer,
        )
    )
