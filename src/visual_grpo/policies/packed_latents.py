"""Latents as a row of tokens, for transformers that read them so (Flux, Qwen-Image): packing and schedule.

Shapes: C x h x w latents of one image, T = h w / 4 tokens of width 4 C, each a cell of 2 x 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from visual_grpo.policies.flow_model import Schedule


def packed(latents: Tensor) -> Tensor:
    """[b, C, h, w] -> [b, T, 4 C]."""
    return pixel_unshuffle(latents, 2).flatten(2).transpose(1, 2)


def unpacked(tokens: Tensor, height: int) -> Tensor:
    """[b, T, 4 C] -> [b, C, h, w], where h is ``height``."""
    return pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (height // 2, -1)), 2)


def packed_schedule(scheduler: Any, steps: int, latent_shape: tuple[int, int, int]) -> Schedule:
    """The pipelines' own: noise levels shifted by the number of image tokens (arXiv 2403.03206, section 5.3.2)."""
    config, (_, h, w) = scheduler.config, latent_shape
    slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    offset = config.base_shift - slope * config.base_image_seq_len
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps), mu=h * w // 4 * slope + offset)
    return Schedule.of(scheduler)
