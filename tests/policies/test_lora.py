"""Adapters while samples are drawn and replayed, in single precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer

from tests.conftest import SIZE, stir
from visual_grpo.components import load_policy
from visual_grpo.policies import lora


@pytest.fixture(params=["ar", "dit"])
def network(request: pytest.FixtureRequest, pipeline_folder: Path) -> Any:
    policy: Any = load_policy(str(pipeline_folder), module=request.param, size=SIZE, device="cpu")
    stir(policy)
    return policy.model.network if request.param == "ar" else policy.model.transformer


def outputs(network: Any) -> list[torch.Tensor]:
    layers = [layer for layer in network.modules() if isinstance(layer, LoraLayer)]
    generator = torch.Generator().manual_seed(1)
    return [layer(torch.randn(2, 5, layer.in_features, generator=generator)) for layer in layers]


def test_a_merged_adapter_takes_part_and_is_taken_out_again(network: Any) -> None:
    before = outputs(network)
    with lora.merged(network), torch.no_grad():
        during = outputs(network)
    for mixed, apart in zip(during, before, strict=True):
        torch.testing.assert_close(mixed, apart.detach(), rtol=1e-5, atol=1e-4)
    after = outputs(network)
    assert all(value.requires_grad and torch.equal(value, old) for value, old in zip(after, before, strict=True))


def test_an_adapter_that_is_off_is_off_while_merged(network: Any) -> None:
    layers = [layer for layer in network.modules() if isinstance(layer, LoraLayer)]
    with_adapter = [value.detach() for value in outputs(network)]
    for layer in layers:
        layer.enable_adapters(False)
    plain = outputs(network)
    with lora.merged(network), torch.no_grad():
        during = outputs(network)
    for value, expected, other in zip(during, plain, with_adapter, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-4)
        assert not torch.allclose(value, other, rtol=1e-3, atol=1e-3)


def test_an_error_while_merged_leaves_the_weights(network: Any) -> None:
    before = outputs(network)
    with pytest.raises(ValueError, match="in between"), lora.merged(network):
        raise ValueError("in between")
    assert all(torch.equal(value, old) for value, old in zip(outputs(network), before, strict=True))
