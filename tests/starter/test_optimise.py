"""The optimiser loop of the pretrainings."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_grpo.starter.optimise import minimise, minimise_in_parts

STEPS, RATE, WARMUP = 6, 0.1, 2
DATA = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
UNUSED = "2.weight"


def network() -> nn.Sequential:
    """Whose last layer no loss depends on."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 3))


def loss_of(model: nn.Sequential, rows: Tensor) -> Tensor:
    """Of some rows, their share of the mean."""
    return F.mse_loss(model[1](model[0](rows).tanh()), rows.roll(1, 1)) * (len(rows) / len(DATA))


def trained_in_parts(sizes: list[int]) -> tuple[dict[str, Tensor], list[int]]:
    model, reported = network(), list[int]()
    minimise_in_parts(
        lambda: [partial(loss_of, model, rows) for rows in DATA.split(sizes)],
        model.parameters(),
        steps=STEPS,
        peak_learning_rate=RATE,
        warmup=WARMUP,
        report=reported.append,
    )
    return dict(model.state_dict()), reported


def test_the_sum_of_parts_is_minimised_as_the_whole() -> None:
    whole = network()
    minimise(
        lambda: loss_of(whole, DATA),
        whole.parameters(),
        steps=STEPS,
        peak_learning_rate=RATE,
        warmup=WARMUP,
        report=lambda done: None,
    )
    parts, reported = trained_in_parts([7, 3])
    assert reported == [1, 2, 3, 4, 5, 6]
    for name, value in whole.state_dict().items():
        assert torch.allclose(parts[name], value, atol=1e-5), name
    before = network().state_dict()
    assert not torch.allclose(parts["0.weight"], before["0.weight"], atol=1e-2)
    assert torch.equal(parts[UNUSED], before[UNUSED])


def test_the_number_of_cores_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    trained = []
    for cores in ({0}, {0, 1}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: cores, raising=False)
        trained.append(trained_in_parts([5, 3, 2])[0])
    torch.set_num_threads(threads)
    one, two = trained
    assert all(torch.equal(one[name], two[name]) for name in one)
