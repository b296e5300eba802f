"""Noise and sharpness of images of which they are known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.rewards.guards import FineNoise
from visual_grpo.types import PromptRecord, RewardOutput

RECORD = PromptRecord(id="x", prompt="")


def judged(*samples: Tensor) -> RewardOutput:
    return FineNoise()([RECORD] * len(samples), samples)


def grey(values: Tensor) -> Tensor:
    return values.round().clamp(0, 255).to(torch.uint8).expand(3, *values.shape)


@pytest.mark.parametrize("deviation", [4.0, 10.0, 25.0])
def test_the_noise_that_was_added_is_found(deviation: float) -> None:
    drawn = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)) * deviation
    ramp = torch.linspace(90, 160, 128)[None] + torch.linspace(-20, 20, 128)[:, None]
    assert -judged(grey(ramp + drawn)).values.item() == pytest.approx(deviation, rel=0.04)
    assert -judged(grey(ramp)).values.item() < 0.7, "a slope is no noise, but for its rounding"


def test_a_single_pixel_by_hand() -> None:
    dot = torch.zeros(5, 5)
    dot[2, 2] = 90
    output = judged(grey(dot))
    assert output.values.item() == pytest.approx(-math.sqrt(math.pi / 2) / 6 * 16 * 90 / 9)
    # The Laplacian is -360 at the dot, 90 at its four neighbours and 0 at the corners: their mean is 0.
    assert output.parts["sharpness"].item() == pytest.approx((360**2 + 4 * 90**2) / 9)


def test_an_image_that_is_too_small_is_refused() -> None:
    with pytest.raises(UserError, match=r"at least 3 x 3 pixels, got \[2, 9\]"):
        judged(torch.zeros(3, 2, 9, dtype=torch.uint8))
