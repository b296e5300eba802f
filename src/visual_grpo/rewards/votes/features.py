"""What a head sees of a picture: numbers that need no weights, or a function of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from visual_grpo.common.errors import UserError
from visual_grpo.common.images import described, is_image
from visual_grpo.common.importing import load_attribute
from visual_grpo.common.types import PromptRecord
from visual_grpo.rewards.guards import LUMA

PIXELS = "pixels"
GRID = 4
"""Cells a side of the small copy of a picture."""

Features = Callable[[Sequence[PromptRecord], Sequence[Tensor]], Tensor]
"""(B prompts, B uint8 pictures [3, height, width]) -> [B, d] finite numbers. A row depends on one prompt and picture,
whatever else is in the batch."""


def load_features(name: str) -> Features:
    """`PIXELS`, or a ``package.module:function`` with the signature of `Features`."""
    if name == PIXELS:
        return pixel_features
    found = load_attribute(name, "the features of the reward votes")
    if not callable(found):
        raise UserError(f"features: {name!r} must be a function (prompts, pictures) -> [B, d], it is {found!r}")
    return _checked(name, found)


def pixel_features(prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
    """[B, 61] float64: a small copy, and how colours, brightness, saturation and edges are distributed.

    Of pictures of any size; the numbers of two sizes of one picture are nearly the same, except those of edges.
    """
    return torch.stack([_of(sample) for sample in samples]) if samples else torch.zeros(0, 61, dtype=torch.float64)


def _of(sample: Tensor) -> Tensor:
    if not is_image(sample):
        raise UserError(f"the reward votes judges pictures, uint8 tensors [3, height, width]; got {described(sample)}")
    rgb = sample.cpu().double() / 255
    luma = (rgb * torch.tensor(LUMA, dtype=torch.float64)[:, None, None]).sum(0)
    high, low = rgb.amax(0), rgb.amin(0)
    chroma = high - low
    # Not divided by the brightness: the hue of a nearly black pixel is noise.
    spread = [values.std(correction=0) for values in (*rgb, luma, chroma)]
    quantiles = [torch.quantile(values, q) for values in (luma, chroma) for q in (0.1, 0.9)]
    edges = [_change(luma), _change(chroma)]
    small = adaptive_avg_pool2d(rgb[None], GRID).flatten()
    return torch.cat([small, torch.stack([luma.mean(), chroma.mean(), *spread, *quantiles, *edges])])


def _change(values: Tensor) -> Tensor:
    """Mean difference of neighbouring pixels; 0 for a picture of one pixel."""
    down, right = values.diff(dim=0).abs(), values.diff(dim=1).abs()
    return (down.sum() + right.sum()) / max(1, down.numel() + right.numel())


def _checked(name: str, function: Features) -> Features:
    def features(prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        found = function(prompts, samples)
        if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != len(samples):
            raise UserError(f"features: {name!r} must return a tensor [{len(samples)}, d], got {described(found)}")
        found = found.detach().cpu().double()
        if not found.isfinite().all():
            raise UserError(f"features: {name!r} returned numbers that are not finite")
        return found

    return features
