"""Latents of mean 0 and std 1 per channel, for a pipeline that knows one scale for all channels."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from visual_grpo.starter.glm_image.pretrain_vae import encode_normalised


def normalise_latents(vae: AutoencoderKL, images: Tensor) -> Tensor:
    """Latents of uint8 [N, 3, H, W] as float32 [N, channels, H/8, W/8] of mean 0 and std 1 per channel.

    Changes ``vae`` so that its latents are these: exactly, since a scale and a shift per channel fold into the 1 x 1
    convolutions before and behind them.
    """
    latents = encode_normalised(vae, images)
    _fold(vae, torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std))
    vae.register_to_config(latents_mean=None, latents_std=None, scaling_factor=1.0, shift_factor=0.0)
    return latents


@torch.no_grad()
def _fold(vae: AutoencoderKL, mean: Tensor, std: Tensor) -> None:
    """``mean`` and ``std``: [channels], of the latents as they are."""
    # The first convolution gives the means and then the log-variances of the latents.
    into, out, channels = vae.quant_conv, vae.post_quant_conv, len(mean)
    into.weight[:channels] /= std.view(-1, 1, 1, 1)
    into.bias[:channels] = (into.bias[:channels] - mean) / std
    into.bias[channels:] -= 2 * std.log()
    out.bias += (out.weight[:, :, 0, 0] * mean).sum(1)
    out.weight *= std.view(1, -1, 1, 1)
