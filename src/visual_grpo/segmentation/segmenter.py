"""The interface of promptable segmentation models: embed an image once, then predict masks for many prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor

Point = tuple[float, float]
"""(x, y) in pixels of the image: (0, 0) is the centre of its first pixel."""
Box = tuple[float, float, float, float]
"""(x1, y1, x2, y2) in pixels, both corners inclusive."""
E = TypeVar("E")


@dataclass(frozen=True, kw_only=True)
class PointPrompt:
    """Points inside and outside an object, at least one inside, and optionally its box."""

    positives: tuple[Point, ...]
    negatives: tuple[Point, ...] = ()
    box: Box | None = None
    """Segmenters that support only points ignore it."""

    def without_negatives(self) -> PointPrompt:
        return PointPrompt(positives=self.positives, box=self.box)


class Segmenter(Protocol[E]):
    """``embed`` is expensive and runs once per image; ``masks`` takes all prompts of an image in one batch."""

    def embed(self, image: Tensor) -> E:
        """``image``: uint8 [3, H, W], RGB."""
        ...

    def masks(self, embedding: E, prompts: Sequence[PointPrompt]) -> Tensor:
        """Bool [K, H, W]: the most likely mask of each prompt, at the image's size; K may be 0."""
        ...


@runtime_checkable
class MultimaskSegmenter(Segmenter[E], Protocol[E]):
    """A segmenter that can return alternative masks of an ambiguous prompt."""

    def multimasks(self, embedding: E, prompt: PointPrompt) -> tuple[Tensor, Tensor]:
        """Alternative masks, bool [M, H, W], and the segmenter's quality estimate of each, [M]."""
        ...
