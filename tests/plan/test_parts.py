"""What a card saves that has a part of every layer, and what it gathers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from visual_grpo.plan.cards import CARDS
from visual_grpo.plan.meter import Meter, Phase
from visual_grpo.plan.parts import Parts
from visual_grpo.plan.time_model import BANDWIDTH_SHARE, seconds_of

LAYER = (8 * 8 + 8) * 4
"""Bytes."""


class Network(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.adapter = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor, checkpointed: bool) -> torch.Tensor:
        value: torch.Tensor = self.embedding(x) + self.adapter
        for layer in self.layers:
            value = checkpoint(layer, value, use_reentrant=False) if checkpointed else layer(value)
        return value


def network(layers: int) -> Network:
    made = Network(layers)
    made.requires_grad_(False)
    made.adapter.requires_grad_(True)
    return made


def test_all_but_a_part_is_saved_and_one_layer_is_there_twice() -> None:
    assert Parts([network(10)], 4).saved == 10 * LAYER * 3 // 4 - 2 * LAYER
    assert Parts([network(10), network(6)], 2).saved == 16 * LAYER // 2 - 2 * LAYER


def test_the_lora_of_a_layer_is_no_part_of_it() -> None:
    made = network(10)
    made.layers[0].register_parameter("lora", nn.Parameter(torch.zeros(1000)))
    assert Parts([made], 2).saved == 10 * LAYER // 2 - 2 * LAYER


@pytest.mark.parametrize("checkpointed", [False, True])
def test_layers_are_gathered_once_forward_and_once_backward(checkpointed: bool) -> None:
    made, meter = network(3), Meter("cpu")
    Parts([made], 4).tell(meter.gather)
    with meter, torch.no_grad():
        made(torch.ones(2, 8), False)
    assert meter.phases["other"].gathered == 3 * LAYER * 3 / 4
    with meter, meter.weighted(10), meter.phase("training"):
        made(torch.ones(2, 8), checkpointed).sum().backward()
    assert meter.phases["training"].gathered == 10 * 2 * 3 * LAYER * 3 / 4


def test_what_comes_from_other_cards_takes_the_time_of_their_link() -> None:
    phase = Phase(gathered=450e9)
    assert seconds_of(phase, CARDS["H100"], "bfloat16") == pytest.approx(1 / BANDWIDTH_SHARE)
    assert seconds_of(phase, CARDS["L40S"], "bfloat16") == pytest.approx(450 / 32 / BANDWIDTH_SHARE)
