"""Pretrains the small DiT to turn image tokens into latents by flow matching."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler, GlmImageTransformer2DModel
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from diffusers.pipelines.glm_image.pipeline_glm_image import calculate_shift
from torch import Tensor

from visual_grpo.policies.glm_image.source_cache import write_sources
from visual_grpo.starter.optimise import Loss, Report, minimise_in_parts

_BATCH = 24
_BATCH_WITH_SOURCES = 16
"""Smaller, because a row with a source costs twice as much."""
_PARTS = 2
"""Of a batch, side by side on the cores: while the DiT learns, there is nothing else to do."""
_LEAST_SIGMA = 0.002
_UNCONDITIONAL_SHARE = 0.1
"""Share of rows whose image tokens are dropped, for classifier-free guidance."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """One source image for each of N pictures."""

    latents: Tensor
    """[N, channels, h, w], normalised."""
    tokens: Tensor
    """[N, (h/2) * (w/2)] int64, already upsampled."""


def pretrain_dit(
    dit: GlmImageTransformer2DModel,
    scheduler: FlowMatchEulerDiscreteScheduler,
    *,
    latents: Tensor,
    tokens: Tensor,
    glyphs: Tensor,
    size: tuple[int, int],
    sources: Sources | None = None,
    steps: int,
    seed: int,
    report: Report,
) -> None:
    """Trains ``dit`` in place as a rectified flow (Liu et al., 2022): x = (1 - sigma) latent + sigma noise, target
    noise - latent.

    ``latents``: [N, channels, h, w], normalised; ``tokens``: [N, (h/2) * (w/2)] int64, already upsampled;
    ``glyphs``: [1, L, width], the embedding of a prompt without quoted text; ``size``: (height, width) in pixels.
    Sigmas are sampled uniformly: a solver's error is an integral over sigma, so few sampling steps suffice.

    With ``sources`` (picture i has source i modulo their number), every other step conditions on them. The steps in
    between do not, as in the denoising of prompts and in the unconditional pass of edits; this also halves the cost.
    """
    generator = torch.Generator().manual_seed(seed)
    dit.train()
    shift = time_shift(scheduler, tokens.shape[1])
    turns = itertools.cycle([False] if sources is None else [False, True])
    unconditional_share = _UNCONDITIONAL_SHARE if sources is None else 2 * _UNCONDITIONAL_SHARE

    def losses_of_step() -> Sequence[Loss]:
        with_sources = next(turns)
        count = _BATCH_WITH_SOURCES if with_sources else _BATCH
        rows = torch.randint(len(latents), (count,), generator=generator)
        noise = torch.randn((count, *latents.shape[1:]), generator=generator)
        sigma = torch.rand(count, 1, 1, 1, generator=generator) * (1 - _LEAST_SIGMA) + _LEAST_SIGMA
        dropped = torch.rand(count, 1, generator=generator) < (0.0 if with_sources else unconditional_share)

        def loss(part: Tensor) -> Tensor:
            """Of some of the batch, [b] int64: their share of its mean."""
            own, clean = len(part), latents[rows[part]]
            velocity = dit(
                hidden_states=(1 - sigma[part]) * clean + sigma[part] * noise[part],
                prior_token_id=tokens[rows[part]],
                prior_token_drop=dropped[part].expand(-1, tokens.shape[1]),
                timestep=unshifted_timesteps(sigma[part].flatten(), shift) - 1,  # - 1 as in the pipeline
                encoder_hidden_states=glyphs.expand(own, -1, -1),
                target_size=torch.tensor([size], dtype=torch.float32).expand(own, -1),
                crop_coords=torch.zeros(own, 2),
                kv_caches=_source_kv(dit, sources, rows[part], glyphs.shape[-1]) if sources and with_sources else None,
                return_dict=False,
            )[0]
            return F.mse_loss(velocity, noise[part] - clean) * (own / count)

        return [partial(loss, part) for part in torch.arange(count).chunk(_PARTS)]

    minimise_in_parts(losses_of_step, dit.parameters(), steps=steps, peak_learning_rate=2e-3, warmup=40, report=report)
    dit.eval().requires_grad_(False)


def _source_kv(dit: GlmImageTransformer2DModel, sources: Sources, rows: Tensor, text_width: int) -> GlmImageKVCache:
    """The DiT's key-value caches of the rows' source images."""
    chosen = rows % len(sources.latents)
    written = write_sources(dit, [sources.latents[chosen]], [sources.tokens[chosen]], text_width)
    return written.select(torch.arange(len(rows)))


def unshifted_timesteps(sigma: Tensor, shift: float) -> Tensor:
    """Timesteps 0..1000 that the pipeline's shift maps to ``sigma``: sigma = mu / (mu + 1000 / t - 1)."""
    return 1000 / (1 + shift * (1 / sigma - 1))


def time_shift(scheduler: FlowMatchEulerDiscreteScheduler, sequence_length: int) -> float:
    """The parameter mu of the pipeline's linear time shift."""
    config = scheduler.config
    return calculate_shift(sequence_length, config.base_image_seq_len, config.base_shift, config.max_shift)
