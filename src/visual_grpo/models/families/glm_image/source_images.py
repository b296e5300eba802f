"""Source images of edits as GLM-Image reads them: tokens for the AR module and the DiT, latents for the DiT.

The DiT runs once over every source without text and at timestep 0, and keeps each layer's keys and values; the
target's queries attend to them. Unlike in diffusers every reader has an object that stays in reading mode, as gradient
checkpointing needs it: a forward that runs again during the backward must find the mode that it left.

Shapes: B rows, K sources a row, n_k DiT tokens of the k-th source, L = the sum of n_k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from cachetools import LRUCache, cachedmethod
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from torch import Tensor

from visual_grpo.common.images import fit, read_image
from visual_grpo.common.types import PromptRecord
from visual_grpo.models.offload import on_device
from visual_grpo.models.rows import source_count

if TYPE_CHECKING:
    from diffusers import GlmImagePipeline, GlmImageTransformer2DModel
    from PIL.Image import Image

_TOKEN_PIXELS = 16
"""Pixels a side that one token of the DiT stands for, whatever the VAE's share of it."""

_CACHED = 256
"""Encoded sources in the LRU cache: a prompt's are read for its tokens, its decodes, and again in the next pass."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One encoded source image."""

    image: Image
    tokens: Tensor
    """[rows, columns] int64, one for every 32 x 32 pixels."""
    latents: Tensor
    """[C, h, w] float32, normalised."""


class SourceEncoder:
    """Encodes source images, once each while they are in use."""

    def __init__(self, pipeline: GlmImagePipeline, size: tuple[int, int]) -> None:
        """``size``: (height, width) in pixels that every source is brought to; prepared ones have it already."""
        self.pipeline, self.size = pipeline, size
        self._encoded: LRUCache[tuple[object, ...], Source] = LRUCache(_CACHED)

    def of(self, records: Sequence[PromptRecord]) -> list[tuple[Source, ...]]:
        """The sources of each record. Raises UserError unless all have equally many."""
        source_count(records)
        return [tuple(self._source(path) for path in record.source_images) for record in records]

    @cachedmethod(attrgetter("_encoded"), key=lambda self, path: (path, _version(path)))
    def _source(self, path: Path) -> Source:
        return self._encode(fit(read_image(path), *self.size))

    @torch.no_grad()
    def _encode(self, image: Image) -> Source:
        ar, vae = self.pipeline.vision_language_encoder, self.pipeline.vae
        with on_device(ar):
            inputs = self.pipeline.processor.image_processor(images=[image], return_tensors="pt").to(ar.device)
            grid = inputs["image_grid_thw"]
            features = ar.get_image_features(inputs["pixel_values"], grid).pooler_output
            tokens = ar.get_image_tokens(features, grid).view(*grid[0, 1:].tolist())
        with on_device(vae):
            latents = self._latents(image, vae)
        return Source(image=image, tokens=tokens, latents=latents)

    def _latents(self, image: Image, vae: Any) -> Tensor:
        pixels = self.pipeline.image_processor.preprocess(image, height=self.size[0], width=self.size[1])
        encoded = vae.encode(pixels.to(vae.device, vae.dtype).contiguous(memory_format=torch.channels_last))
        mean = torch.tensor(vae.config.latents_mean, device=vae.device).view(-1, 1, 1)
        std = torch.tensor(vae.config.latents_std, device=vae.device).view(-1, 1, 1)
        latents = (encoded.latent_dist.mode()[0].float() - mean) / std
        return latents.contiguous()


def _version(path: Path) -> tuple[int, ...]:
    """Returns time, size and inode, which change when the file is written again; () if it is missing."""
    if not path.exists():
        return ()
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


@dataclass(frozen=True, kw_only=True)
class SourceCache:
    """Keys and values of the sources of B rows in the DiT, a tensor [B, L, heads, dim] for each of its layers."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    def select(self, rows: Tensor) -> GlmImageKVCache:
        """A reading cache for a batch of ``rows`` ([b] int64, repeats allowed); it holds views, and gradient flows."""
        chosen = rows.tolist()
        cache = GlmImageKVCache(num_layers=len(self.keys))
        for layer, keys, values in zip(cache.caches, self.keys, self.values, strict=True):
            own_keys, own_values = keys.split(1), values.split(1)
            layer.k_caches = [own_keys[row] for row in chosen]
            layer.v_caches = [own_values[row] for row in chosen]
        cache.set_mode("read")
        return cache


def write_sources(
    dit: GlmImageTransformer2DModel, latents: Sequence[Tensor], tokens: Sequence[Tensor], text_width: int
) -> SourceCache:
    """Runs one forward a source, as ``GlmImagePipeline.__call__`` does for each row alone.

    Args:
        latents: K normalised latents [B, channels, h_k, w_k] in the DiT's dtype.
        tokens: K prior tokens [B, n_k] int64 of the same sources, already upsampled.
        text_width: width of the glyph embeddings; the sources are read without any.

    Gradient reaches the DiT's weights unless the caller switched it off.
    """
    written = [_write(dit, own, ids, text_width) for own, ids in zip(latents, tokens, strict=True)]
    keys, values = zip(*written, strict=True)
    return SourceCache(keys=_joined(keys), values=_joined(values))


def upsampled(tokens: Tensor) -> Tensor:
    """Tokens as the DiT takes them, each twice as high and wide: [B, rows, columns] -> [B, 4 * rows * columns]."""
    return tokens.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)


def _write(
    dit: GlmImageTransformer2DModel, latents: Tensor, tokens: Tensor, text_width: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Keys and values of one source of every row, a tensor [B, n_k, heads, dim] for each layer."""
    count, _, height, width = latents.shape
    pixels = _TOKEN_PIXELS // dit.config.patch_size
    cache = GlmImageKVCache(num_layers=dit.config.num_layers)
    cache.set_mode("write")
    dit(
        hidden_states=latents,
        encoder_hidden_states=latents.new_zeros(count, 0, text_width),
        prior_token_id=tokens,
        prior_token_drop=torch.zeros_like(tokens, dtype=torch.bool),
        timestep=latents.new_zeros(count),
        target_size=latents.new_tensor([[height * pixels, width * pixels]]).expand(count, -1),
        crop_coords=latents.new_zeros(count, 2),
        kv_caches=cache,
    )
    return tuple(layer.k_caches[0] for layer in cache.caches), tuple(layer.v_caches[0] for layer in cache.caches)


def _joined(of_sources: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Each layer's tensors of all sources, one after the other along the tokens."""
    return tuple(torch.cat(layer, dim=1) for layer in zip(*of_sources, strict=True))
