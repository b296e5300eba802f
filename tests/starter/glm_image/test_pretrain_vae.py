"""The training images of the small VAE, and the criterion for a good one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import visual_grpo.starter.glm_image.modules as modules
from visual_grpo.starter.glm_image.pretrain_dit import colour_error, pretrain_vae
from visual_grpo.starter.shapes.world import BACKGROUND

HEIGHT, WIDTH = 96, 128


@pytest.mark.parametrize(("whole_share", "whole"), [(0.4, 2), (0.0, 0), (1.0, 5)])
def test_the_last_steps_see_whole_images(whole_share: float, whole: int) -> None:
    vae = modules.build_vae(HEIGHT, WIDTH, 0)
    shown: list[tuple[int, ...]] = []
    vae.encoder.register_forward_hook(lambda module, given, _: shown.append(tuple(given[0].shape)))
    images = torch.randint(256, (4, 3, HEIGHT, WIDTH), dtype=torch.uint8)
    pretrain_vae(vae, images, steps=5, whole_share=whole_share, seed=0, report=lambda done: None)
    assert shown == [(8, 3, 64, 64)] * (5 - whole) + [(3, 3, HEIGHT, WIDTH)] * whole


class Dulling:
    """Returns images with the difference from the background reduced and the background shifted."""

    def __init__(self, share: float, shift: float) -> None:
        self.share, self.shift = share, shift

    def encode(self, pixels: Tensor) -> Any:
        return SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: pixels))

    def decode(self, pixels: Tensor) -> Any:
        ground = (torch.tensor(BACKGROUND) / 127.5 - 1).view(1, 3, 1, 1)
        return SimpleNamespace(sample=torch.where(pixels == ground, ground + self.shift, pixels - self.share * pixels))


def test_the_colour_error_is_that_of_the_objects_alone() -> None:
    images = torch.tensor(BACKGROUND, dtype=torch.uint8).view(1, 3, 1, 1).repeat(200, 1, 16, 16)
    images[:, :, 4:9, 4:9] = torch.tensor([255, 255, 0], dtype=torch.uint8).view(3, 1, 1)
    images[::2, :, 4:9, 4:9] = torch.tensor([255, 0, 0], dtype=torch.uint8).view(3, 1, 1)
    assert colour_error(Dulling(0.0, 0.5), images) == 0
    # Each of three channels is at an end of -1..1 and loses a tenth of it.
    assert colour_error(Dulling(0.1, 0.0), images) == pytest.approx(0.1 * 3**0.5 / 2)
    assert colour_error(Dulling(0.1, 0.0), images[:3]) == pytest.approx(0.1 * 3**0.5 / 2)
    # If four in five have no error (here because they have no object), the fifth counts.
    images[torch.arange(200) % 5 > 0] = images[0, :, :1, :1]
    assert colour_error(Dulling(0.1, 0.5), images) == pytest.approx(0.1 * 3**0.5 / 2)
    assert colour_error(Dulling(0.1, 0.5), images[:, :, :4, :4]) == 0
