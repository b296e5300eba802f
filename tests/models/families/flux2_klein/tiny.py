"""A Flux2KleinPipeline of the real classes, small and with random weights."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.families.sd3 import tiny as sd3
from tests.models.families.z_image import tiny as z_image


def pipeline(*, distilled: bool = False) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, Flux2Transformer2DModel

    torch.set_num_threads(1)
    words = z_image.tokenizer()
    encoder = z_image.text_encoder(words, layers=28)  # The pipeline reads layers 9, 18 and 27.
    torch.manual_seed(0)
    transformer = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=3 * 32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    return sd3.frozen(
        Flux2KleinPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
            vae=vae(),
            text_encoder=encoder,
            tokenizer=words,
            transformer=transformer,
            is_distilled=distilled,
        )
    )


def vae() -> Any:
    """Its patches have means and variances that are not 0 and 1, as a trained one's."""
    from diffusers import AutoencoderKLFlux2

    torch.manual_seed(2)
    vae = AutoencoderKLFlux2(
        block_out_channels=(4, 4, 4, 4),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=1,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
    )
    vae.bn.running_mean.normal_()
    vae.bn.running_var.uniform_(0.5, 2)
    return vae
