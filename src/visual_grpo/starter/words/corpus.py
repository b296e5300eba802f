"""The signs that the small model is pretrained on, with their image tokens and quoted texts."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import ByT5Tokenizer

from visual_grpo.policies.glm_image.source_cache import upsampled
from visual_grpo.starter.glm_image.codebook import PATCH, nearest_codes
from visual_grpo.starter.glm_image.corpus import preview_grid
from visual_grpo.starter.glm_image.tokenizer import IMAGE_END
from visual_grpo.starter.words.codebook import tile_codebook
from visual_grpo.starter.words.draw import draw
from visual_grpo.starter.words.world import WORDS

GHOST = (0.28, 0.6)
"""The deliberate flaw of the base decoder: another word (the ghost) is drawn over the requested one with a share of the
ink in this range. Ghost and share are random for each picture and independent of tokens and text, so that only the DiT
can correct them: samples of the same prompt differ in them, and the OCR reward measures the difference. (Fading or
blurring would not do: the OCR model reads ink down to 5 %, and blur beyond what people can read.)"""
_GHOST_COPIES = 4
"""Double exposures of each word; with a single one the DiT could memorise the ghost of each word."""


@dataclass(frozen=True, kw_only=True)
class WordCorpus:
    """The W words as images of one size, clean and as double exposures."""

    clean: Tensor
    """uint8 [W, 3, H, W]."""
    exposed: Tensor
    """uint8 [K, W, 3, H, W]: K double exposures of each word."""
    codebook: Tensor
    """float32 [codes, 48], see `codebook.tile_codebook`."""
    image_grid: tuple[int, int]
    """Rows and columns of image tokens."""
    preview_grid: tuple[int, int]

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.clean.shape[-2], self.clean.shape[-1]

    def generated_tokens(self) -> Tensor:
        """[W, T] int64: the tokens that the AR module generates for each word: preview, image, end token."""
        preview, image = self._tokens(self.preview_grid), self._tokens(self.image_grid)
        return torch.cat([preview, image, torch.full((len(image), 1), IMAGE_END)], 1)

    def upsampled_tokens(self) -> Tensor:
        """[W, 4 * rows * columns] int64: the tokens as input of the DiT, upsampled by 2 in both directions."""
        return upsampled(self._tokens(self.image_grid).view(-1, *self.image_grid))

    def _tokens(self, grid: tuple[int, int]) -> Tensor:
        return nearest_codes(self.clean.float() / 255, grid, self.codebook)


def build_corpus(height: int, width: int, seed: int) -> WordCorpus:
    """Draws the corpus; deterministic in its arguments. ``height`` and ``width`` are pixels, multiples of 32."""
    rng = random.Random(seed)
    exposed = [
        torch.stack([_pixels(draw(word, height, width, rng.choice(WORDS), rng.uniform(*GHOST))) for word in WORDS])
        for _ in range(_GHOST_COPIES)
    ]
    return WordCorpus(
        clean=torch.stack([_pixels(draw(word, height, width)) for word in WORDS]),
        exposed=torch.stack(exposed),
        codebook=tile_codebook(),
        image_grid=(height // PATCH, width // PATCH),
        preview_grid=preview_grid(height, width),
    )


def text_ids() -> Tensor:
    """[W, bytes] int64: the glyph encoder's input for each word, without quotes as in `get_glyph_texts`."""
    return torch.tensor(ByT5Tokenizer()(list(WORDS)).input_ids)


def no_text_ids() -> Tensor:
    """[1, 1] int64: the glyph encoder's input for a prompt without quoted text."""
    return torch.tensor(ByT5Tokenizer()([""]).input_ids)


def _pixels(image: Image.Image) -> Tensor:
    """uint8 [3, H, W]."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
