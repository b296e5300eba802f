"""The deliberate flaw of the base decoder: objects have washed-out colours.

The amount of fading is random for each picture and independent of its tokens, so that only the DiT can correct it: full
colours keep some probability, samples with the same tokens differ, and a reward measures the difference. (A flaw that
depends on tokens, such as one shape for another, gave mixed pictures and gradients that disagreed between rollouts.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from visual_grpo.starter.shapes.world import BACKGROUND

FADING = (0.15, 0.6)
"""Range of the uniformly distributed share of the background in an object's colour."""


def fade(images: Tensor, seed: int) -> Tensor:
    """Mixes each picture of uint8 [N, 3, H, W] with the background by a random share; same shape and dtype."""
    low, high = FADING
    generator = torch.Generator().manual_seed(seed)
    shares = low + (high - low) * torch.rand(len(images), 1, 1, 1, generator=generator)
    background = torch.tensor(BACKGROUND, dtype=torch.float32).view(3, 1, 1)
    faded = [
        (background + (1 - share) * (image.float() - background)).round().to(torch.uint8)
        for image, share in zip(images, shares, strict=True)
    ]
    return torch.stack(faded)
