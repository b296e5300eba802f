"""The pictures of shapes that the small model is pretrained on, with their image tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from visual_grpo.models.families.glm_image.source_images import upsampled
from visual_grpo.starter.glm_image.codebook import CELLS, IMAGE_END, PATCH, fit_codebook, nearest_codes, patch_features
from visual_grpo.starter.shapes.render import (
    BACKGROUND,
    COMBINATIONS,
    EDITS,
    Combination,
    Jitter,
    draw_all,
    draw_edit,
    draw_scene,
    random_edit,
    stacked,
)

Grid = tuple[int, int]
"""Rows and columns of image tokens."""

PREVIEW_SIDE = 2
"""Tokens per side of a square image's preview (16 in the released model)."""
_IMAGES_PER_COMBINATION = 10
_EDITS = 1500
_SEED_OFFSET = 1_000_003
"""Makes these pictures differ from those of the dataset with the same seed."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """K pictures of each of C prompts, all of one size."""

    images: Tensor
    """uint8 [C, K, 3, H, W]."""
    codebook: Tensor
    """float32 [codes, 48]."""

    @property
    def image_grid(self) -> Grid:
        return grids_of(*self.images.shape[-2:])[0]

    @property
    def preview_grid(self) -> Grid:
        return grids_of(*self.images.shape[-2:])[1]

    def generated_tokens(self) -> Tensor:
        """[C, K, T] int64: the tokens that the AR module generates for each picture: preview, image, end token."""
        pixels = _pixels(self.images)
        preview, image = (nearest_codes(pixels, grid, self.codebook) for grid in (self.preview_grid, self.image_grid))
        end = torch.full((len(image), 1), IMAGE_END)
        return torch.cat([preview, image, end], 1).view(*self.images.shape[:2], -1)

    def upsampled_tokens(self, images: Tensor) -> Tensor:
        """[N, 4 * rows * columns] int64: tokens of images of this size (uint8 [N, 3, H, W]) as input of the DiT.

        Upsampled by 2 in both directions.
        """
        tokens = nearest_codes(images.float() / 255, self.image_grid, self.codebook)
        return upsampled(tokens.view(-1, *self.image_grid))


class SceneBank:
    """Computes the image tokens of any scene of shapes without rendering it.

    Two objects of a scene never share a cell, so the features of a scene are the sum of its objects' features.
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
        """[B, rows * columns] int64: tokens of B scenes of up to two objects (None = no object).

        ``jitters`` are indices into ``self.jitters``, one per object.
        """
        features = self._background.expand(len(scenes), *self._offsets.shape[2:]).clone()
        for row, (things, jitters_of_row) in enumerate(zip(scenes, jitters, strict=True)):
            for thing, jitter in zip(things, jitters_of_row, strict=True):
                if thing is not None:
                    features[row] += self._offsets[self._rank[thing], jitter]
        return torch.cdist(features, self.codebook).argmin(-1)


def build_corpus(height: int, width: int, seed: int) -> Corpus:
    """Renders the corpus; deterministic in its arguments. ``height`` and ``width`` are pixels, multiples of 32."""
    images = draw_all(_IMAGES_PER_COMBINATION, height, width, seed + _SEED_OFFSET)
    return Corpus(images=images, codebook=fit_codebook(_pixels(images), grids_of(height, width), seed))


def draw_edits(height: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Renders sources and targets, both uint8 [N, 3, H, W], of edits of every kind in equal numbers."""
    rng = random.Random(seed + _SEED_OFFSET)
    edits = [random_edit(EDITS[i % len(EDITS)], rng.choice(COMBINATIONS), rng) for i in range(_EDITS)]
    sources, targets = zip(*(draw_edit(edit, height, width, rng) for edit in edits), strict=True)
    return stacked(sources), stacked(targets)


def grids_of(height: int, width: int) -> list[Grid]:
    """Grids of an image and of its preview, the latter by the rule of the released processor with a smaller side."""
    ratio = math.sqrt(height / width)
    preview = max(1, int(PREVIEW_SIDE * ratio)), max(1, int(PREVIEW_SIDE / ratio))
    return [(height // PATCH, width // PATCH), preview]


def _pixels(images: Tensor) -> Tensor:
    return images.flatten(0, 1).float() / 255
