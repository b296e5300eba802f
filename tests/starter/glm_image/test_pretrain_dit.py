"""The small DiT's pretraining with and without sources."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import visual_grpo.starter.glm_image.modules as modules
from visual_grpo.starter.glm_image.codebook import CODEBOOK_SIZE, FEATURES
from visual_grpo.starter.glm_image.pretrain_dit import Sources, pretrain_dit
from visual_grpo.starter.optimise import minimise

PICTURES, SOURCES, WIDTH = 6, 3, 32
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
        modules.build_scheduler(),
        latents=torch.randn(PICTURES, modules.LATENT_CHANNELS, 4, 4, generator=generator),
        tokens=torch.randint(CODEBOOK_SIZE, (PICTURES, 4), generator=generator),
        glyphs=torch.randn(1, 2, WIDTH, generator=generator),
        size=(32, 32),
        sources=read,
        steps=steps,
        seed=3,
        report=lambda done: None,
    )
    weight: Tensor = dit.transformer_blocks[0].attn1.to_v.weight
    return weight


def test_every_other_step_reads_the_sources(codebook: Tensor) -> None:
    assert torch.equal(trained(codebook, 1, sources(4)), trained(codebook, 1, sources(5)))
    assert not torch.equal(trained(codebook, 2, sources(4)), trained(codebook, 2, sources(5)))
    assert torch.equal(trained(codebook, 2, sources(4)), trained(codebook, 2, sources(4)))


def test_the_learning_rate_rises_and_falls_and_every_step_is_reported() -> None:
    weight, unused, reported = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(1)), list[int]()
    moves: list[float] = []

    def backward() -> None:
        moves.append(weight.item())
        (-1000 * weight).sum().backward()

    minimise(backward, [weight, unused], steps=4, peak_learning_rate=0.1, warmup=2, report=reported.append)
    assert reported == [1, 2, 3, 4]
    # Adam moves by the learning rate where the gradient never changes: 0.1 * rise * (1 - 0.97 * step / 4).
    steps = torch.tensor([*moves, weight.item()]).diff()
    expected = [0.1 * 0.5, 0.1 * (1 - 0.97 / 4), 0.1 * (1 - 0.97 / 2), 0.1 * (1 - 0.97 * 3 / 4)]
    assert steps.tolist() == pytest.approx(expected, rel=2e-2)
    assert unused.item() == 1
