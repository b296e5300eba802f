"""Pretrains the small AutoencoderKL on crops of the drawn images, and on whole ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor

from visual_grpo.starter.optimise import Report, minimise
from visual_grpo.starter.shapes.world import BACKGROUND

_CROPS = 8
_CROP = 64
_WHOLE_IMAGES = 3
"""A step: half again as many pixels of a 128 px image as its crops have."""
_LATENT_PIXELS = 8
"""Pixels a side that one latent stands for; crops start at multiples of it."""
_LATENT_NOISE = 0.08
_OBJECT_WEIGHT = 3.0
"""Most of a crop is background: without it colours come last, and a dull decoder caps what training can reach."""
_TIE = 0.3
_ENCODE_BATCH = 32
_JUDGED = 64
"""Images that a finished VAE is judged by."""


def pretrain_vae(
    vae: AutoencoderKL, images: Tensor, *, steps: int, whole_share: float, seed: int, report: Report
) -> None:
    """Reconstruction with a little latent noise, so that the decoder forgives an inexact DiT.

    Three latent channels are also held to the pixels' local means: without it some seeds give latents that the
    DiT learns far worse. Crops show more objects for the same work, but the group norms see other statistics in
    them than in whole images: colours that were right in crops alone come out dull in images.

    Args:
        images: uint8 [N, 3, H, W].
        whole_share: the last steps, as a share of all, that see whole images.

    Trains ``vae`` in place.
    """
    generator = torch.Generator().manual_seed(seed)
    draws = iter([_random_crops] * round(steps * (1 - whole_share)) + [_random_images] * steps)
    vae.train().to(memory_format=torch.channels_last)

    def loss_of_step() -> Tensor:
        pixels = next(draws)(images, generator)
        latents = vae.encode(pixels).latent_dist.mean
        noise = torch.randn(latents.shape, generator=generator)
        decoded = vae.decode(latents + _LATENT_NOISE * noise, return_dict=False)[0]
        weight = _object_weight(pixels)
        error = (weight * ((decoded - pixels).square() + 0.3 * (decoded - pixels).abs())).mean()
        means = F.avg_pool2d(pixels, _LATENT_PIXELS)
        return error + _TIE * F.mse_loss(latents[:, : means.shape[1]], means) + 1e-4 * latents.square().mean()

    minimise(loss_of_step, vae.parameters(), steps=steps, peak_learning_rate=2.5e-3, warmup=20, report=report)
    vae.eval().requires_grad_(False)


@torch.no_grad()
def colour_error(vae: AutoencoderKL, images: Tensor) -> float:
    """Distance in RGB, 0..1, between the mean colours of the objects and of their reconstructions.

    The mean over the worst fifth of some of ``images``, uint8 [N, 3, H, W], since it is one colour that comes out
    dull. A pixel counts by its distance from the background.
    """
    pixels = to_model_range(images[:: -(-len(images) // _JUDGED)])
    decoded = torch.cat(
        [vae.decode(vae.encode(some).latent_dist.mode()).sample for some in pixels.split(_ENCODE_BATCH)]
    )
    weight = _from_background(pixels)
    off = (weight * (decoded - pixels)).sum((2, 3)) / weight.sum((2, 3)).clamp(min=1e-6)
    return float(off.norm(dim=1).topk(-(-len(pixels) // 5)).values.mean()) / 2


def encode_normalised(vae: AutoencoderKL, images: Tensor) -> Tensor:
    """Latents of uint8 [N, 3, H, W] as float32 [N, channels, H/8, W/8] of mean 0 and std 1 per channel.

    Writes that mean and std into the VAE's configuration, where the pipeline looks for them.
    """
    latents = _encode(vae, images)
    mean, std = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    return (latents - mean[:, None, None]) / std[:, None, None]


def encode_like(vae: AutoencoderKL, images: Tensor) -> Tensor:
    """Likewise, with the mean and std that stand in the VAE's configuration."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (vae.config.latents_mean, vae.config.latents_std))
    return (_encode(vae, images) - mean) / std


@torch.no_grad()
def _encode(vae: AutoencoderKL, images: Tensor) -> Tensor:
    batches = images.split(_ENCODE_BATCH)
    return torch.cat([vae.encode(to_model_range(batch)).latent_dist.mode() for batch in batches]).contiguous()


def to_model_range(images: Tensor) -> Tensor:
    """uint8 0..255 -> float32 -1..1, channels last in memory (the faster layout on a CPU)."""
    return (images.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last)


def _object_weight(pixels: Tensor) -> Tensor:
    """[B, 1, h, w] of mean 1: the farther a pixel's colour is from the background's, the more it counts."""
    weight = 1 + _OBJECT_WEIGHT * _from_background(pixels)
    return weight / weight.mean()


def _from_background(pixels: Tensor) -> Tensor:
    """[B, 1, h, w]: how far each pixel's colour is from the background's."""
    background = (torch.tensor(BACKGROUND) / 127.5 - 1).view(1, 3, 1, 1)
    return (pixels - background).square().sum(1, keepdim=True).sqrt()


def _random_images(images: Tensor, generator: torch.Generator) -> Tensor:
    return to_model_range(images[torch.randint(len(images), (_WHOLE_IMAGES,), generator=generator)])


def _random_crops(images: Tensor, generator: torch.Generator) -> Tensor:
    height, width = images.shape[-2:]
    crop_height, crop_width = min(_CROP, height), min(_CROP, width)
    rows = torch.randint((height - crop_height) // _LATENT_PIXELS + 1, (_CROPS,), generator=generator).tolist()
    columns = torch.randint((width - crop_width) // _LATENT_PIXELS + 1, (_CROPS,), generator=generator).tolist()
    chosen = torch.randint(len(images), (_CROPS,), generator=generator).tolist()
    crops = [
        images[i, :, y * 8 : y * 8 + crop_height, x * 8 : x * 8 + crop_width]
        for i, y, x in zip(chosen, rows, columns, strict=True)
    ]
    return to_model_range(torch.stack(crops))
