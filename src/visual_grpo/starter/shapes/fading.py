"""What the base decoder gets wrong on purpose: objects come out in washed-out colours.

How much an object fades is drawn for each picture and does not depend on its tokens, so that only the
DiT can mend it: the right depth keeps some probability, samples that share their tokens differ, and a
reward sees by how much. (A fault that tokens decide, say one shape for another, gave half-and-half
pictures and no gradient that agreed between rollouts.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from visual_grpo.starter.shapes.world import BACKGROUND

FADING = (0.15, 0.6)
"""Share of the background's colour in the object's, uniform between these."""


def fade(images: Tensor, seed: int) -> Tensor:
    """uint8 [N, 3, H, W] -> the same with each picture mixed with the background by a share of its own."""
    low, high = FADING
    generator = torch.Generator().manual_seed(seed)
    share = low + (high - low) * torch.rand(len(images), 1, 1, 1, generator=generator)
    background = torch.tensor(BACKGROUND, dtype=torch.float32).view(3, 1, 1)
    faded = [
        (background + (1 - own) * (image.float() - background)).round().to(torch.uint8)
        for image, own in zip(images, share, strict=True)
    ]
    return torch.stack(faded)
