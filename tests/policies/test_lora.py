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


def gradients(network: Any) -> list[torch.Tensor]:
    """Of inputs and adapters, for one gradient of all outputs."""
    layers = [layer for layer in network.modules() if isinstance(layer, LoraLayer)]
    generator = torch.Generator().manual_seed(1)
    found: list[torch.Tensor] = []
    for layer in layers:
        x = torch.randn(2, 5, layer.in_features, generator=generator, requires_grad=True)
        y = layer(x)
        own = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        assert len(own) == 2
        found += torch.autograd.grad(y, (x, *own), torch.randn(y.shape, generator=generator))
    return found


def test_a_folded_adapter_has_pefts_values_and_gradients(network: Any) -> None:
    values, expected = outputs(network), gradients(network)
    with lora.merged_with_gradient(network):
        folded_values, found = outputs(network), gradients(network)
    with lora.merged(network), torch.no_grad():
        drawn = outputs(network)
    for value, other, exact in zip(folded_values, values, drawn, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-4)
        assert torch.equal(value, exact), "the replay's weights are those that tokens are drawn with"
    for own, pefts in zip(found, expected, strict=True):
        assert float((own - pefts).abs().max() / pefts.abs().max()) < 1e-5
    assert all(torch.equal(after, before) for after, before in zip(gradients(network), expected, strict=True))


def test_an_adapter_that_is_off_is_off_while_folded(network: Any) -> None:
    for layer in network.modules():
        if isinstance(layer, LoraLayer):
            layer.enable_adapters(False)
    plain = outputs(network)
    with lora.merged_with_gradient(network):
        assert all(torch.equal(value, own) for value, own in zip(outputs(network), plain, strict=True))
