"""Guards against reward hacking: reported with weight 0 alongside the optimised rewards.

For example, a policy trained on a text reward alone learned to blank backgrounds: the reward rose while edge density
and colour entropy halved.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.types import PromptRecord

LUMA = (0.299, 0.587, 0.114)
"""Weights of R, G and B (ITU-R BT.601)."""


class EdgeDensity:
    """Share of pixels whose luma gradient (luma in 0..1, central differences) exceeds ``threshold`` per pixel."""

    def __init__(self, threshold: float = 0.1) -> None:
        if not 0 < threshold < 1:
            raise UserError(f"edge_density: threshold must be between 0 and 1, got {threshold}")
        self.threshold = threshold

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> list[float]:
        return [self._density(sample) for sample in samples]

    def _density(self, image: Tensor) -> float:
        weights = torch.tensor(LUMA, device=image.device)[:, None, None]
        luma = (image.float() / 255 * weights).sum(0)
        down, right = torch.gradient(luma)
        return float((torch.hypot(down, right) > self.threshold).float().mean())


class ColourEntropy:
    """Shannon entropy in bits of the colour histogram with ``levels`` levels per channel; 0 for a single colour."""

    def __init__(self, levels: int = 8) -> None:
        if not 2 <= levels <= 256:
            raise UserError(f"colour_entropy: levels must be from 2 to 256, got {levels}")
        self.levels = levels

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> list[float]:
        return [self._entropy(sample) for sample in samples]

    def _entropy(self, image: Tensor) -> float:
        red, green, blue = image.long() * self.levels // 256
        counts = torch.bincount(((red * self.levels + green) * self.levels + blue).flatten())
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * shares.log2()).sum()) + 0.0  # not -0.0 for one colour
