"""JPEG compressibility: a reward that needs no model, from DDPO (arXiv 2305.13301, section 5.2)."""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.images import to_pil
from visual_grpo.types import PromptRecord


class JpegSizeReward:
    """Minus the file size in kilobytes (1000 bytes) at JPEG ``quality``.

    With a negative weight it rewards detail instead.
    """

    def __init__(self, quality: int = 95) -> None:
        if not 1 <= quality <= 100:
            raise UserError(f"jpeg_size: quality must be from 1 to 100, got {quality}")
        self.quality = quality

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        sizes = [self._bytes(sample) for sample in samples]
        return -torch.tensor(sizes, dtype=torch.float32) / 1000

    def _bytes(self, image: Tensor) -> int:
        buffer = io.BytesIO()
        to_pil(image).save(buffer, "JPEG", quality=self.quality)
        return buffer.tell()
