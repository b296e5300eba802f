"""The training images of the small VAE, the criterion for a good one, and the DiT with and without sources."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from visual_grpo.starter.glm_image import modules
from visual_grpo.starter.glm_image.codebook import CODEBOOK_SIZE, FEATURES
from visual_grpo.starter.glm_image.pretrain_decoder import Sources, colour_error, pretrain_dit, pretrain_vae
from visual_grpo.starter.pretraining import Job
from visual_grpo.starter.shapes.render import BACKGROUND


def job_of(height: int, width: int, seed: int = 0, **steps: int) -> Job:
    return Job(folder=Path("unused"), height=height, width=width, seed=seed, steps=steps)


HEIGHT, WIDTH = 96, 128


def test_the_last_steps_see_whole_images() -> None:
    vae = modules.build_vae(HEIGHT, WIDTH, 0)
    shown: list[tuple[int, ...]] = []
    vae.encoder.register_forward_hook(lambda module, given, _: shown.append(tuple(given[0].shape)))
    images = torch.randint(256, (4, 3, HEIGHT, WIDTH), dtype=torch.uint8)
    pretrain_vae(vae, images, 0.4, job_of(HEIGHT, WIDTH, vae=5), lambda module, done: None)
    assert shown == [(8, 3, 64, 64)] * 3 + [(3, 3, HEIGHT, WIDTH)] * 2


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


PICTURES, SOURCES, TEXT_WIDTH = 6, 3, 32
"""Two pictures of every source, as with two fadings of each target."""


@pytest.fixture(scope="module")
def codebook() -> Tensor:
    return torch.rand(CODEBOOK_SIZE, FEATURES, generator=torch.Generator().manual_seed(0))


def sources(seed: int) -> Sources:
    generator = torch.Generator().manual_seed(seed)
    return Sources(
        latents=torch.randn(SOURCES, modules.LATENT_CHANNELS, 4, 4, generator=generator),
        tokens=torch.randint(CODEBOOK_SIZE, (SOURCES, 4), generator=generator),
    )


def trained(codebook: Tensor, steps: int, read: Sources | None) -> Tensor:
    """A weight whose gradient depends only on the attention to the sources and on the picture itself."""
    generator = torch.Generator().manual_seed(1)
    dit = modules.build_dit(codebook, seed=2)
    pretrain_dit(
        dit,
        latents=torch.randn(PICTURES, modules.LATENT_CHANNELS, 4, 4, generator=generator),
        tokens=torch.randint(CODEBOOK_SIZE, (PICTURES, 4), generator=generator),
        glyphs=torch.randn(1, 2, TEXT_WIDTH, generator=generator),
        sources=read,
        job=job_of(32, 32, seed=3, dit=steps),
        advance=lambda module, done: None,
    )
    weight: Tensor = dit.transformer_blocks[0].attn1.to_v.weight
    return weight


def test_every_other_step_reads_the_sources(codebook: Tensor) -> None:
    assert torch.equal(trained(codebook, 1, sources(4)), trained(codebook, 1, sources(5)))
    assert not torch.equal(trained(codebook, 2, sources(4)), trained(codebook, 2, sources(5)))
    assert torch.equal(trained(codebook, 2, sources(4)), trained(codebook, 2, sources(4)))
