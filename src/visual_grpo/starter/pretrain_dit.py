"""Pretrains the small DiT to turn image tokens into latents by flow matching."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler, GlmImageTransformer2DModel
from diffusers.pipelines.glm_image.pipeline_glm_image import calculate_shift
from torch import Tensor

from visual_grpo.starter.optimise import Report, minimise

_BATCH = 24
_LEAST_SIGMA = 0.002
_UNCONDITIONAL_SHARE = 0.1
"""Rows whose image tokens are dropped, for classifier-free guidance."""


def pretrain_dit(
    dit: GlmImageTransformer2DModel,
    scheduler: FlowMatchEulerDiscreteScheduler,
    *,
    latents: Tensor,
    tokens: Tensor,
    glyphs: Tensor,
    size: tuple[int, int],
    steps: int,
    seed: int,
    report: Report,
) -> None:
    """Rectified flow (Liu et al., 2022): x = (1 - sigma) latent + sigma noise, target noise - latent.

    ``latents``: [N, channels, h, w], normalised; ``tokens``: [N, (h/2) * (w/2)] int64, already upsampled;
    ``glyphs``: [1, L, width], the embedding of a prompt without quoted text; ``size``: (height, width) in pixels.
    Sigmas are uniform: a solver's error is an integral over sigma, so that few steps suffice. Trains ``dit`` in place.
    """
    generator = torch.Generator().manual_seed(seed)
    dit.train()
    shift = time_shift(scheduler, tokens.shape[1])
    constants = {
        "encoder_hidden_states": glyphs.expand(_BATCH, -1, -1),
        "target_size": torch.tensor([size], dtype=torch.float32).expand(_BATCH, -1),
        "crop_coords": torch.zeros(_BATCH, 2),
        "return_dict": False,
    }

    def loss_of_step() -> Tensor:
        rows = torch.randint(len(latents), (_BATCH,), generator=generator)
        clean, noise = latents[rows], torch.randn((_BATCH, *latents.shape[1:]), generator=generator)
        sigma = torch.rand(_BATCH, 1, 1, 1, generator=generator) * (1 - _LEAST_SIGMA) + _LEAST_SIGMA
        dropped = torch.rand(_BATCH, 1, generator=generator) < _UNCONDITIONAL_SHARE
        velocity = dit(
            hidden_states=(1 - sigma) * clean + sigma * noise,
            prior_token_id=tokens[rows],
            prior_token_drop=dropped.expand(-1, tokens.shape[1]),
            timestep=unshifted_timesteps(sigma.flatten(), shift) - 1,  # the pipeline, too, passes them less one
            **constants,
        )[0]
        return F.mse_loss(velocity, noise - clean)

    minimise(loss_of_step, dit.parameters(), steps=steps, peak_learning_rate=2e-3, warmup=40, report=report)
    dit.eval().requires_grad_(False)


def unshifted_timesteps(sigma: Tensor, shift: float) -> Tensor:
    """Timesteps 0..1000 whose sigmas after the pipeline's shift are these: sigma = mu / (mu + 1000 / t - 1)."""
    return 1000 / (1 + shift * (1 / sigma - 1))


def time_shift(scheduler: FlowMatchEulerDiscreteScheduler, sequence_length: int) -> float:
    """mu of the pipeline's linear time shift."""
    config = scheduler.config
    return calculate_shift(sequence_length, config.base_image_seq_len, config.base_shift, config.max_shift)
