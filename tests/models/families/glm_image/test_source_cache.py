"""The sources' keys and values against the pipeline's own way of writing them."""

from __future__ import annotations

import pytest
import torch
from diffusers import GlmImageTransformer2DModel
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from torch import Tensor

from visual_grpo.models.families.glm_image.source_images import SourceCache, write_sources
from visual_grpo.starter.glm_image import modules
from visual_grpo.starter.glm_image.codebook import CODEBOOK_SIZE, FEATURES

Sources = tuple[list[Tensor], list[Tensor]]
ROWS, WIDTH = 3, 32
SIZES = ((8, 12), (4, 4))
"""Latent rows and columns of the two sources of every row."""


@pytest.fixture
def dit() -> GlmImageTransformer2DModel:
    codebook = torch.rand(CODEBOOK_SIZE, FEATURES, generator=torch.Generator().manual_seed(0))
    return modules.build_dit(codebook, seed=2)


@pytest.fixture
def sources() -> Sources:
    generator = torch.Generator().manual_seed(1)
    latents = [torch.randn(ROWS, modules.LATENT_CHANNELS, *size, generator=generator) for size in SIZES]
    counts = [rows * columns // 4 for rows, columns in SIZES]
    tokens = [torch.randint(CODEBOOK_SIZE, (ROWS, count), generator=generator) for count in counts]
    return latents, tokens


def denoise(dit: GlmImageTransformer2DModel, rows: int, cache: GlmImageKVCache | None) -> Tensor:
    """The velocity [rows, channels, 8, 8] of one state."""
    generator = torch.Generator().manual_seed(3)
    velocity: Tensor = dit(
        hidden_states=torch.randn(1, modules.LATENT_CHANNELS, 8, 8, generator=generator).expand(rows, -1, -1, -1),
        encoder_hidden_states=torch.randn(1, 2, WIDTH, generator=generator).expand(rows, -1, -1),
        prior_token_id=torch.arange(16).expand(rows, -1),
        prior_token_drop=torch.zeros(rows, 16, dtype=torch.bool),
        timestep=torch.full((rows,), 500.0),
        target_size=torch.tensor([[64.0, 64.0]]).expand(rows, -1),
        crop_coords=torch.zeros(rows, 2),
        return_dict=False,
        kv_caches=cache,
    )[0]
    return velocity


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_pass_through_the_sources(
    dit: GlmImageTransformer2DModel, sources: Sources, checkpointing: bool
) -> None:
    """Under checkpointing a forward runs again in the backward: it must not write or read anything else."""
    if checkpointing:
        dit.enable_gradient_checkpointing()
        dit.train()

    def gradient(cache: SourceCache) -> list[Tensor]:
        dit.zero_grad()
        denoise(dit, ROWS, cache.select(torch.arange(ROWS))).square().sum().backward()
        block = dit.transformer_blocks[0].attn1
        return [layer.weight.grad.clone() for layer in (block.to_k, block.to_v)]

    through = gradient(write_sources(dit, *sources, WIDTH))
    with torch.no_grad():
        frozen = write_sources(dit, *sources, WIDTH)
    for own, without_sources in zip(through, gradient(frozen), strict=True):
        assert (own - without_sources).norm() > 0.01 * without_sources.norm()
    assert frozen.keys[0].grad_fn is None
    if checkpointing:
        dit.disable_gradient_checkpointing()
        for own, plain in zip(through, gradient(write_sources(dit, *sources, WIDTH)), strict=True):
            torch.testing.assert_close(own, plain, rtol=1e-4, atol=1e-6)


def test_the_gradient_is_that_of_the_librarys_own_cache(dit: GlmImageTransformer2DModel, sources: Sources) -> None:
    """One row, where the library's way of writing, then reading the same object, is possible."""
    latents, tokens = ([source[:1] for source in kind] for kind in sources)
    stock = GlmImageKVCache(num_layers=3)
    stock.set_mode("write")
    for own, ids in zip(latents, tokens, strict=True):
        size = torch.tensor([[8.0 * own.shape[2], 8.0 * own.shape[3]]])
        dropped = torch.zeros_like(ids, dtype=torch.bool)
        dit(own, torch.zeros(1, 0, WIDTH), ids, dropped, torch.zeros(1), size, torch.zeros(1, 2), kv_caches=stock)
    stock.set_mode("read")
    ours = write_sources(dit, latents, tokens, WIDTH).select(torch.zeros(1, dtype=torch.long))
    projections = [layer.weight for block in dit.transformer_blocks for layer in (block.attn1.to_k, block.attn1.to_v)]
    gradients = [torch.autograd.grad(denoise(dit, 1, cache).square().sum(), projections) for cache in (ours, stock)]
    for own, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)
