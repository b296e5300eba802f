"""What a promptable segmentation model must do: see an image once, then answer many prompts about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor

Point = tuple[float, float]
"""(x, y) in pixels of the image: (0, 0) is the centre of its first pixel."""
Box = tuple[float, float, float, float]
"""(x1, y1, x2, y2) in pixels, both corners inside."""
E = TypeVar("E")


@dataclass(frozen=True, kw_only=True)
class PointPrompt:
    """Where an object is, and where it is not. At least one positive point."""

    positives: tuple[Point, ...]
    negatives: tuple[Point, ...] = ()
    box: Box | None = None
    """A segmenter that knows only points may leave it unread."""

    def without_negatives(self) -> PointPrompt:
        return PointPrompt(positives=self.positives, box=self.box)


class Segmenter(Protocol[E]):
    """``embed`` is the costly half and runs once an image; ``masks`` answers all prompts of it in one batch."""

    def embed(self, image: Tensor) -> E:
        """``image``: uint8 [3, H, W], RGB."""
        ...

    def masks(self, embedding: E, prompts: Sequence[PointPrompt]) -> Tensor:
        """Bool [K, H, W]: each prompt's most likely object, at the size of the image; K = 0 gives [0, H, W]."""
        ...


@runtime_checkable
class MultimaskSegmenter(Segmenter[E], Protocol[E]):
    """One that can say what else a prompt might mean."""

    def multimasks(self, embedding: E, prompt: PointPrompt) -> tuple[Tensor, Tensor]:
        """Bool [M, H, W], and [M] how good the segmenter thinks each of them is."""
        ...
