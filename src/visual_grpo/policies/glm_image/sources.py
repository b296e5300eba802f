"""Source images of edits as GLM-Image reads them: tokens for the AR module and the DiT, latents for the DiT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from cachetools import LRUCache, cachedmethod
from torch import Tensor

from visual_grpo.hardware.turns import present
from visual_grpo.images import fit, read_image
from visual_grpo.policies.rows import source_count
from visual_grpo.types import PromptRecord

if TYPE_CHECKING:
    from diffusers import GlmImagePipeline
    from PIL.Image import Image

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
        self._encoded: LRUCache[Path, Source] = LRUCache(_CACHED)

    def of(self, records: Sequence[PromptRecord]) -> list[tuple[Source, ...]]:
        """The sources of each record. Raises UserError unless all have equally many."""
        source_count(records)
        return [tuple(self._source(path) for path in record.source_images) for record in records]

    @cachedmethod(attrgetter("_encoded"))
    def _source(self, path: Path) -> Source:
        return self._encode(fit(read_image(path), *self.size))

    @torch.no_grad()
    def _encode(self, image: Image) -> Source:
        ar, vae = self.pipeline.vision_language_encoder, self.pipeline.vae
        with present(ar):
            inputs = self.pipeline.processor.image_processor(images=[image], return_tensors="pt").to(ar.device)
            grid = inputs["image_grid_thw"]
            features = ar.get_image_features(inputs["pixel_values"], grid).pooler_output
            tokens = ar.get_image_tokens(features, grid).view(*grid[0, 1:].tolist())
        with present(vae):
            latents = self._latents(image, vae)
        return Source(image=image, tokens=tokens, latents=latents)

    def _latents(self, image: Image, vae: Any) -> Tensor:
        pixels = self.pipeline.image_processor.preprocess(image, height=self.size[0], width=self.size[1])
        encoded = vae.encode(pixels.to(vae.device, vae.dtype).contiguous(memory_format=torch.channels_last))
        mean = torch.tensor(vae.config.latents_mean, device=vae.device).view(-1, 1, 1)
        std = torch.tensor(vae.config.latents_std, device=vae.device).view(-1, 1, 1)
        latents = (encoded.latent_dist.mode()[0].float() - mean) / std
        return latents.contiguous()
