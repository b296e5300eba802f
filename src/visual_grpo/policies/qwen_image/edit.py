"""Source images of edits, as Qwen-Image-Edit reads them: pictures for its text encoder, latents for its transformer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_grpo.images import fit, read_image
from visual_grpo.types import PromptRecord

if TYPE_CHECKING:
    from diffusers import QwenImageEditPipeline
    from PIL.Image import Image

_AREA = 1024 * 1024
"""Pixels that the pipeline brings every source to, whatever the size of the edited image."""


class SourceEncoder:
    """Encodes the one source image of each record."""

    def __init__(self, pipeline: QwenImageEditPipeline, size: tuple[int, int]) -> None:
        """``size``: (height, width) in pixels that every source is cut to; prepared ones have it already."""
        from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions

        self.pipeline, self.size = pipeline, size
        self._width, self._height, _ = calculate_dimensions(_AREA, size[1] / size[0])
        cell = 2 * pipeline.vae_scale_factor
        self.shape = (1, self._height // cell, self._width // cell)
        """Frames, rows and columns of its tokens."""

    def image(self, record: PromptRecord) -> Image:
        """What the text encoder sees."""
        source = fit(read_image(record.source_images[0]), *self.size)
        resized: Image = self.pipeline.image_processor.resize(source, self._height, self._width)
        return resized

    def tokens(self, images: Sequence[Image]) -> Tensor:
        """[N, S, 4 C] float32 of N images that ``image`` gave."""
        return torch.cat([self._tokens(image) for image in images])

    def _tokens(self, image: Image) -> Tensor:
        vae = self.pipeline.vae
        pixels = self.pipeline.image_processor.preprocess(image, self._height, self._width).unsqueeze(2)
        latents = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist.mode()[:, :, 0].float()
        mean, std = (
            torch.tensor(values, device=latents.device).view(-1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        return F.pixel_unshuffle((latents - mean) / std, 2).flatten(2).transpose(1, 2)
