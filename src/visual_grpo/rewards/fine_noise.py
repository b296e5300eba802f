"""How noisy and how sharp an image is, told from it alone: a guard against texture that fools a learned reward."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.rewards.guards import LUMA
from visual_grpo.types import PromptRecord, RewardOutput

_NOISE = ((1.0, -2.0, 1.0), (-2.0, 4.0, -2.0), (1.0, -2.0, 1.0))
"""The difference of two Laplacians: 0 on planes and on straight edges along the axes."""
_LAPLACIAN = ((0.0, 1.0, 0.0), (1.0, -4.0, 1.0), (0.0, 1.0, 0.0))


class FineNoise:
    """Minus the standard deviation of the noise in the luma, in levels of 0..255 (Immerkær 1996, "Fast noise variance
    estimation"): 0 for a smooth image, about -10 for noise that is plainly seen.

    It measures noise, not beauty: fine texture that belongs to the picture counts too, so compare it with what the base
    model draws. Part ``sharpness``: the variance of the Laplacian of the luma in levels squared (Pech-Pacheco et al.
    2000), which falls as pictures blur.
    """

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> RewardOutput:
        lumas = [_luma(sample) for sample in samples]
        return RewardOutput(
            values=torch.tensor([-_noise(luma) for luma in lumas]),
            parts={"sharpness": torch.tensor([_sharpness(luma) for luma in lumas])},
        )


def _luma(sample: Tensor) -> Tensor:
    """[height, width] float64 in 0..255 of a uint8 image [3, height, width]."""
    if min(sample.shape[-2:]) < 3:
        raise UserError(f"fine_noise: an image needs at least 3 x 3 pixels, got {list(sample.shape[-2:])}")
    return (sample.cpu().double() * torch.tensor(LUMA, dtype=torch.float64)[:, None, None]).sum(0)


def _noise(luma: Tensor) -> float:
    """From the mean absolute response of the mask, whose standard deviation is 6 times that of the noise; sqrt(pi / 2)
    turns a normal variable's mean absolute value into its standard deviation."""
    return math.sqrt(math.pi / 2) / 6 * float(_filtered(luma, _NOISE).abs().mean())


def _sharpness(luma: Tensor) -> float:
    return float(_filtered(luma, _LAPLACIAN).var(correction=0))


def _filtered(luma: Tensor, mask: Sequence[Sequence[float]]) -> Tensor:
    """[height - 2, width - 2]: where the mask fits whole."""
    return F.conv2d(luma[None, None], torch.tensor(mask, dtype=luma.dtype)[None, None])[0, 0]
