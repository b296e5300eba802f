"""The pictures that the small model is pretrained on, with their image tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from visual_grpo.starter.codebook import PATCH, fit_codebook, nearest_codes
from visual_grpo.starter.shapes import draw_all
from visual_grpo.starter.tokenizer import IMAGE_END

PREVIEW_SIDE = 2
"""Tokens along each side of a square format's preview; the released model's is 16."""
_IMAGES_PER_COMBINATION = 10
_SEED_OFFSET = 1_000_003
"""Keeps these pictures different from those of the dataset that has the same seed."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """C combinations, K pictures of each, in one size."""

    images: Tensor
    """uint8 [C, K, 3, H, W]."""
    codebook: Tensor
    """float32 [codes, 48], see `codebook.fit_codebook`."""
    image_grid: tuple[int, int]
    """Rows and columns of image tokens."""
    preview_grid: tuple[int, int]

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.images.shape[-2], self.images.shape[-1]

    def generated_tokens(self) -> Tensor:
        """[C, K, T] int64, what the AR module generates for each picture: preview, image, end."""
        preview, image = self._tokens(self.preview_grid), self._tokens(self.image_grid)
        end = torch.full((len(image), 1), IMAGE_END)
        return torch.cat([preview, image, end], 1).view(*self.images.shape[:2], -1)

    def upsampled_tokens(self) -> Tensor:
        """[C * K, 4 * rows * columns] int64, what the DiT gets: every token twice as high and wide."""
        tokens = self._tokens(self.image_grid).view(-1, *self.image_grid)
        return tokens.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)

    def _tokens(self, grid: tuple[int, int]) -> Tensor:
        return nearest_codes(_pixels(self.images), grid, self.codebook)


def build_corpus(height: int, width: int, seed: int) -> Corpus:
    """Deterministic in its arguments; ``height`` and ``width`` are pixels, multiples of 32."""
    images = draw_all(_IMAGES_PER_COMBINATION, height, width, seed + _SEED_OFFSET)
    grid, preview = (height // PATCH, width // PATCH), preview_grid(height, width)
    return Corpus(
        images=images,
        codebook=fit_codebook(_pixels(images), [grid, preview], seed),
        image_grid=grid,
        preview_grid=preview,
    )


def preview_grid(height: int, width: int) -> tuple[int, int]:
    """Rows and columns of the preview, by the released processor's rule with another side."""
    ratio = math.sqrt(height / width)
    return max(1, int(PREVIEW_SIDE * ratio)), max(1, int(PREVIEW_SIDE / ratio))


def _pixels(images: Tensor) -> Tensor:
    return images.flatten(0, 1).float() / 255
