"""The sources' keys and values against the pipeline's own way of writing them."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from diffusers import GlmImagePipeline, GlmImageTransformer2DModel
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from PIL import Image
from torch import Tensor

import visual_grpo.starter.glm_image.modules as modules
from visual_grpo.policies.glm_image.sources import SourceCache, write_sources
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


def parts(cache: GlmImageKVCache) -> list[Tensor]:
    return [tensor for layer in cache.caches for tensor in (torch.cat(layer.k_caches), torch.cat(layer.v_caches))]


@torch.no_grad()
def test_it_equals_what_the_pipeline_writes_source_by_source(pipeline_folder) -> None:
    """Two rows of two sources of different sizes; the pipeline's cache is caught where it is made."""
    pipeline = GlmImagePipeline.from_pretrained(pipeline_folder)
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.Generator().manual_seed(4)
    pixels = [[torch.rand(3, 8 * h, 8 * w, generator=noise) for h, w in SIZES] for _ in range(2)]
    images = [[Image.fromarray((p * 255).byte().permute(1, 2, 0).numpy()) for p in row] for row in pixels]
    tokens = [torch.randint(CODEBOOK_SIZE, (2, h * w // 4), generator=noise) for h, w in SIZES]
    made: list[GlmImageKVCache] = []

    class Caught(GlmImageKVCache):
        def clear(self) -> None:  # called when the pipeline is done
            made.append(self)

    with mock.patch("diffusers.pipelines.glm_image.pipeline_glm_image.GlmImageKVCache", Caught):
        pipeline(
            prompt=["a", "b"],
            image=images,
            height=64,
            width=64,
            prior_token_ids=torch.zeros(2, 16, dtype=torch.long),
            prior_token_image_ids=[torch.cat([own[row] for own in tokens]) for row in range(2)],
            source_image_grid_thw=[torch.tensor([[1, h // 2, w // 2] for h, w in SIZES])] * 2,
            num_inference_steps=1,
            output_type="latent",
        )
    config = pipeline.vae.config
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (config.latents_mean, config.latents_std))
    latents = []
    for k, (h, w) in enumerate(SIZES):
        batch = torch.cat([pipeline.image_processor.preprocess(row[k], height=8 * h, width=8 * w) for row in images])
        latents.append((pipeline.vae.encode(batch).latent_dist.mode() - mean) / std)
    width = pipeline.text_encoder.config.d_model
    cache = write_sources(pipeline.transformer, latents, tokens, width).select(torch.arange(2))
    assert cache.caches[0].k_caches[0].shape[1] == sum(h * w // 4 for h, w in SIZES)
    for own, stock in zip(parts(cache), parts(made[0]), strict=True):
        torch.testing.assert_close(own, stock, rtol=0, atol=1e-5)


@torch.no_grad()
def test_each_row_reads_its_own_sources(dit: GlmImageTransformer2DModel, sources: Sources) -> None:
    written = write_sources(dit, *sources, WIDTH)
    rows = torch.tensor([2, 0, 2, 1])
    together = denoise(dit, 4, written.select(rows))
    alone = torch.cat([denoise(dit, 1, written.select(row[None])) for row in rows])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(together[0], together[2], rtol=0, atol=1e-6)
    assert (together[0] - together[1]).abs().max() > 1e-3
    assert (together[0] - denoise(dit, 1, None)[0]).abs().max() > 1e-3


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_reaches_keys_and_values_through_the_sources(
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
