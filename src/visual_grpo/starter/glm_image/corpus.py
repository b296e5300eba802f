"""The pictures that the small model is pretrained on, with their image tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from visual_grpo.policies.glm_image.source_cache import upsampled
from visual_grpo.starter.glm_image.codebook import CELLS, PATCH, fit_codebook, nearest_codes, patch_features
from visual_grpo.starter.glm_image.tokenizer import IMAGE_END
from visual_grpo.starter.shapes.draw import Jitter, draw_all, draw_scene, stacked
from visual_grpo.starter.shapes.edits import draw_edit, random_edit
from visual_grpo.starter.shapes.world import BACKGROUND, COMBINATIONS, EDITS, Combination

Grid = tuple[int, int]
"""Rows and columns of image tokens."""

PREVIEW_SIDE = 2
"""Tokens along each side of a square format's preview; the released model's is 16."""
_IMAGES_PER_COMBINATION = 10
_EDITS = 1500
_SEED_OFFSET = 1_000_003
"""Keeps these pictures different from those of the dataset that has the same seed."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """C combinations, K pictures of each, in one size."""

    images: Tensor
    """uint8 [C, K, 3, H, W]."""
    codebook: Tensor
    """float32 [codes, 48], see `codebook.fit_codebook`."""
    image_grid: Grid
    preview_grid: Grid

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
        return upsampled(self._tokens(self.image_grid).view(-1, *self.image_grid))

    def _tokens(self, grid: Grid) -> Tensor:
        return nearest_codes(_pixels(self.images), grid, self.codebook)


@dataclass(frozen=True, kw_only=True)
class EditCorpus:
    """N edits as pictures, with the tokens that the DiT gets of them."""

    sources: Tensor
    """uint8 [N, 3, H, W], like ``targets``."""
    targets: Tensor
    source_tokens: Tensor
    """[N, 4 * rows * columns] int64, already upsampled, like ``target_tokens``."""
    target_tokens: Tensor


class SceneBank:
    """Image tokens of any scene of the drawn world, without drawing it.

    Two objects of a scene never share a cell, so that its features are those of its objects put together.
    """

    def __init__(self, codebook: Tensor, height: int, width: int, seed: int) -> None:
        self.codebook = codebook
        self.grid: Grid = (height // PATCH, width // PATCH)
        rng = random.Random(seed + _SEED_OFFSET)
        self.jitters = [Jitter.draw(rng) for _ in range(_IMAGES_PER_COMBINATION)]
        pictures = [draw_scene([(c, jitter)], height, width) for c in COMBINATIONS for jitter in self.jitters]
        features = patch_features(stacked(pictures).float() / 255, self.grid)
        self._background = (torch.tensor(BACKGROUND) / 255).repeat(CELLS * CELLS)
        self._offsets = (features - self._background).unflatten(0, (len(COMBINATIONS), len(self.jitters)))
        self._rank = {combination: i for i, combination in enumerate(COMBINATIONS)}

    def tokens(
        self, scenes: Sequence[tuple[Combination | None, Combination | None]], jitters: Sequence[tuple[int, int]]
    ) -> Tensor:
        """[B, rows * columns] int64 of B scenes of two objects, each there or not.

        ``jitters`` are indices into the bank's own, one for each of the two.
        """
        features = self._background.expand(len(scenes), *self._offsets.shape[2:]).clone()
        for row, (things, own) in enumerate(zip(scenes, jitters, strict=True)):
            for thing, jitter in zip(things, own, strict=True):
                if thing is not None:
                    features[row] += self._offsets[self._rank[thing], jitter]
        return torch.cdist(features, self.codebook).argmin(-1)


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


def build_edit_corpus(codebook: Tensor, height: int, width: int, seed: int) -> EditCorpus:
    """Deterministic; edits of every kind in equal numbers."""
    rng = random.Random(seed + _SEED_OFFSET)
    edits = [random_edit(EDITS[i % len(EDITS)], rng.choice(COMBINATIONS), rng) for i in range(_EDITS)]
    sources, targets = (stacked(side) for side in zip(*(draw_edit(e, height, width, rng) for e in edits), strict=True))
    grid = (height // PATCH, width // PATCH)
    own, asked = (
        upsampled(nearest_codes(images.float() / 255, grid, codebook).view(-1, *grid)) for images in (sources, targets)
    )
    return EditCorpus(sources=sources, targets=targets, source_tokens=own, target_tokens=asked)


def preview_grid(height: int, width: int) -> Grid:
    """Rows and columns of the preview, by the released processor's rule with another side."""
    ratio = math.sqrt(height / width)
    return max(1, int(PREVIEW_SIDE * ratio)), max(1, int(PREVIEW_SIDE / ratio))


def _pixels(images: Tensor) -> Tensor:
    return images.flatten(0, 1).float() / 255
