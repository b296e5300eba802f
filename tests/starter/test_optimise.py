"""The optimiser loop of the pretrainings."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from visual_grpo.starter.optimise import minimise


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
