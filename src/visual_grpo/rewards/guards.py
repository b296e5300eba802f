"""Rewards computed from images alone: guards against reward hacking, reported with weight 0, and JPEG size.

For example, a policy trained on a text reward alone learned to blank backgrounds: the reward rose while edge density
and colour entropy halved.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_grpo.common.errors import UserError
from visual_grpo.common.images import LUMA, to_pil
from visual_grpo.common.types import Needs, PromptRecord, RewardOutput
from visual_grpo.rewards.reward import groups_of

_EDGE = 0.1
_LEVELS = 8
_BLACK, _WHITE = 5, 250
_NOISE = ((1.0, -2.0, 1.0), (-2.0, 4.0, -2.0), (1.0, -2.0, 1.0))
"""The difference of two Laplacians: 0 on planes and on straight edges along the axes."""
_LAPLACIAN = ((0.0, 1.0, 0.0), (1.0, -4.0, 1.0), (0.0, 1.0, 0.0))


class EdgeDensity:
    """Share of pixels whose luma gradient (luma in 0..1, central differences) exceeds 0.1 per pixel."""

    guard = "its pictures are emptier"

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> list[float]:
        return [self._density(sample) for sample in samples]

    def _density(self, image: Tensor) -> float:
        luma = (image.float() / 255 * torch.tensor(LUMA, device=image.device)[:, None, None]).sum(0)
        down, right = torch.gradient(luma)
        return float((torch.hypot(down, right) > _EDGE).float().mean())


class Exposure:
    """Share of pixels that are neither black nor white: luma of 5 to 250 in 0..255. It falls where pictures are over-
    or under-exposed."""

    guard = "larger areas of its pictures are black or white"

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> list[float]:
        weights = torch.tensor(LUMA)[:, None, None]
        lumas = ((sample.cpu().float() * weights).sum(0) for sample in samples)
        return [float(((luma >= _BLACK) & (luma <= _WHITE)).float().mean()) for luma in lumas]


class ColourEntropy:
    """Shannon entropy in bits of the colour histogram with 8 levels per channel; 0 for a single colour."""

    guard = "its pictures are emptier"

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> list[float]:
        return [self._entropy(sample) for sample in samples]

    def _entropy(self, image: Tensor) -> float:
        red, green, blue = image.long() * _LEVELS // 256
        counts = torch.bincount(((red * _LEVELS + green) * _LEVELS + blue).flatten())
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * shares.log2()).sum()) + 0.0  # not -0.0 for one colour


class GroupDiversity:
    """A sample's mean distance to the other samples of its prompt, in [0, 1]; 0 where all are the same, unscored for a
    prompt with one sample.

    The distance is the root mean square difference of the images scaled to 16 x 16 pixels. As a guard it shows a policy
    that generates the same image again and again; as a reward it works against that.
    """

    needs = Needs(whole_groups=True)

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        values = torch.full((len(samples),), torch.nan)
        for rows in groups_of(prompts):
            if len(rows) > 1:
                small = torch.stack([_small(samples[row]) for row in rows])
                apart = torch.stack([(small - row).square().mean(1).sqrt() for row in small])
                # Sorted, so that the sum does not depend on the order of the samples.
                values[rows] = apart.sort(1).values.sum(1) / (len(rows) - 1)
        return values


def _small(sample: Tensor) -> Tensor:
    """Few pixels, so that noise is not taken for variety."""
    return F.interpolate(sample[None].cpu().float() / 255, (16, 16), mode="area").flatten()


class FineNoise:
    """Minus the standard deviation of the noise in the luma, in levels of 0..255 (Immerkær 1996, "Fast noise variance
    estimation"): 0 for a smooth image, about -10 for noise that is plainly seen.

    It measures noise, not beauty: fine texture that belongs to the picture counts too, so compare it with what the base
    model generates. Part ``sharpness``: the variance of the Laplacian of the luma in levels squared (Pech-Pacheco et
    al. 2000), which falls as pictures blur.
    """

    guard = "its pictures are noisier"

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> RewardOutput:
        lumas = [_luma(sample) for sample in samples]
        return RewardOutput(
            values=torch.tensor([-_noise(luma) for luma in lumas]),
            parts={"sharpness": torch.tensor([float(_filtered(luma, _LAPLACIAN).var(correction=0)) for luma in lumas])},
        )


def _luma(sample: Tensor) -> Tensor:
    """[height, width] float64 in 0..255 of a uint8 image [3, height, width]."""
    if min(sample.shape[-2:]) < 3:
        raise UserError(f"fine_noise: an image needs at least 3 x 3 pixels, got {list(sample.shape[-2:])}")
    return (sample.cpu().double() * torch.tensor(LUMA, dtype=torch.float64)[:, None, None]).sum(0)


def _noise(luma: Tensor) -> float:
    """Estimated from the mean absolute response of the mask, whose standard deviation is 6 times that of the noise;
    sqrt(pi / 2) turns a normal variable's mean absolute value into its standard deviation."""
    return math.sqrt(math.pi / 2) / 6 * float(_filtered(luma, _NOISE).abs().mean())


def _filtered(luma: Tensor, mask: Sequence[Sequence[float]]) -> Tensor:
    """[height - 2, width - 2]: where the mask fits whole."""
    return F.conv2d(luma[None, None], torch.tensor(mask, dtype=luma.dtype)[None, None])[0, 0]


class JpegSizeReward:
    """Minus the file size in kilobytes (1000 bytes) at JPEG quality 95 (DDPO, arXiv 2305.13301, section 5.2).

    With a negative weight it rewards detail instead.
    """

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        buffers = [io.BytesIO() for _ in samples]
        for buffer, sample in zip(buffers, samples, strict=True):
            to_pil(sample).save(buffer, "JPEG", quality=95)
        return -torch.tensor([buffer.tell() for buffer in buffers], dtype=torch.float32) / 1000
