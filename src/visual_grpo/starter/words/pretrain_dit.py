"""Pretrains the small DiT together with the glyph encoder to write quoted words by flow matching."""

from __future__ import annotations

from itertools import chain

import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler, GlmImageTransformer2DModel
from torch import Tensor
from transformers import T5EncoderModel

from visual_grpo.starter.glm_image.pretrain_dit import time_shift, unshifted_timesteps
from visual_grpo.starter.optimise import Report, minimise
from visual_grpo.starter.words.corpus import no_text_ids, text_ids

_BATCH = 24
_UNCONDITIONAL_ROWS = 2
"""Rows of a batch without text and image tokens, for classifier-free guidance; they need a separate forward pass,
because their texts are shorter and the DiT has no padding mask."""
_LEAST_SIGMA = 0.002


def pretrain_dit_and_glyphs(
    dit: GlmImageTransformer2DModel,
    glyph_encoder: T5EncoderModel,
    scheduler: FlowMatchEulerDiscreteScheduler,
    *,
    latents: Tensor,
    tokens: Tensor,
    size: tuple[int, int],
    steps: int,
    seed: int,
    report: Report,
) -> None:
    """Trains both modules in place as a rectified flow, like `glm_image.pretrain_dit` but with a text for every row.

    ``latents``: [K, W, channels, h, w], normalised, K pictures of each of the W words; ``tokens``: [W, (h/2) * (w/2)]
    int64, already upsampled; ``size``: (height, width) in pixels.
    """
    generator = torch.Generator().manual_seed(seed)
    dit.train()
    glyph_encoder.train()
    shift, texts, no_text = time_shift(scheduler, tokens.shape[1]), text_ids(), no_text_ids()

    def velocity(noisy: Tensor, sigma: Tensor, words: Tensor, *, conditional: bool) -> Tensor:
        ids = texts[words] if conditional else no_text.expand(len(words), -1)
        return dit(
            hidden_states=noisy,
            encoder_hidden_states=glyph_encoder(ids).last_hidden_state,
            prior_token_id=tokens[words],
            prior_token_drop=torch.full_like(tokens[words], not conditional, dtype=torch.bool),
            timestep=unshifted_timesteps(sigma.flatten(), shift) - 1,  # - 1 as in the pipeline
            target_size=torch.tensor([size], dtype=torch.float32).expand(len(words), -1),
            crop_coords=torch.zeros(len(words), 2),
            return_dict=False,
        )[0]

    def loss_of_step() -> Tensor:
        copies = torch.randint(latents.shape[0], (_BATCH,), generator=generator)
        words = torch.randint(latents.shape[1], (_BATCH,), generator=generator)
        clean, noise = latents[copies, words], torch.randn((_BATCH, *latents.shape[2:]), generator=generator)
        sigma = torch.rand(_BATCH, 1, 1, 1, generator=generator) * (1 - _LEAST_SIGMA) + _LEAST_SIGMA
        noisy = (1 - sigma) * clean + sigma * noise
        without, rest = slice(0, _UNCONDITIONAL_ROWS), slice(_UNCONDITIONAL_ROWS, None)
        predicted = torch.cat(
            [
                velocity(noisy[without], sigma[without], words[without], conditional=False),
                velocity(noisy[rest], sigma[rest], words[rest], conditional=True),
            ]
        )
        return F.mse_loss(predicted, noise - clean)

    weights = chain(dit.parameters(), glyph_encoder.parameters())
    minimise(loss_of_step, weights, steps=steps, peak_learning_rate=2e-3, warmup=40, report=report)
    for module in (dit, glyph_encoder):
        module.eval().requires_grad_(False)
