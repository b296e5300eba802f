"""What a quantised layer holds and computes, by the definitions of its formats."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from visual_grpo.models.quantized import FORMATS, QuantizedLinear, quantize, quantized_layers

pytest.importorskip("bitsandbytes", reason="make quantised")
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NF4 = (
    *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0),
)
"""Appendix E of arXiv 2305.14314."""
LEVELS = {"4bit": torch.tensor(NF4), "8bit": torch.arange(-127, 128) / 127}


def layer(dtype: torch.dtype = torch.float32, inputs: int = 128, outputs: int = 96) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(inputs, outputs).requires_grad_(False)
    nn.init.normal_(made.weight, std=0.02)
    made.weight.data[9, 5] = 0.5
    return made.to(dtype)


def quantised(base: nn.Linear, bits: str) -> QuantizedLinear:
    return QuantizedLinear(base, FORMATS[bits], CPU)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", FORMATS)
def test_every_number_becomes_the_nearest_level_of_its_block(bits: str, dtype: torch.dtype) -> None:
    base = layer(dtype)
    base.weight.data[:8] = 0
    blocks = base.weight.float().view(-1, FORMATS[bits].block)
    scales = blocks.abs().amax(1, keepdim=True).clamp(min=1e-9)
    levels = LEVELS[bits]
    nearest = levels[((blocks / scales)[..., None] - levels).abs().argmin(-1)] * scales
    found = quantised(base, bits)
    assert found.weight.dtype == dtype
    assert found.weight.shape == base.weight.shape
    error, least = ((own - blocks).abs() for own in (found.weight.float().view_as(blocks), nearest))
    rounding = torch.finfo(dtype).eps * nearest.abs() + 1e-4 * scales  # Hardly a number between two steps is turned.
    assert bool((error <= least + rounding).all())
    assert not found.weight[:8].any(), "zeros stay zeros"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", FORMATS)
def test_products_and_gradients_are_those_of_the_weight_that_it_shows(bits: str, dtype: torch.dtype) -> None:
    found = quantised(layer(dtype), bits)
    plain = nn.Linear(128, 96).requires_grad_(False).to(dtype)
    plain.weight.data, plain.bias.data = found.weight, found.bias.data
    first, second = (torch.randn(2, 7, 128, generator=torch.Generator().manual_seed(1)).to(dtype) for _ in range(2))
    outputs = [own(x.requires_grad_()) for own, x in ((found, first), (plain, second))]
    outputs[0].square().sum().backward()
    outputs[1].square().sum().backward()
    assert torch.equal(*outputs)
    assert torch.equal(first.grad, second.grad)  # type: ignore[arg-type]
    with torch.no_grad():
        assert torch.equal(found(first), plain(second)), "sampling computes as training does"


@pytest.mark.parametrize("bits", FORMATS)
def test_for_the_gradient_only_codes_are_kept(bits: str) -> None:
    found, kept = quantised(layer(), bits), []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        found(torch.randn(4, 128, requires_grad=True)).sum().backward()
    assert {tensor.untyped_storage()._cdata for tensor in kept} == {
        buffer.untyped_storage()._cdata for buffer in (found.codes, found.scales)
    }


@pytest.mark.parametrize(("bits", "bytes_a_number"), [("8bit", 1 + 4 / 256), ("4bit", 0.5 + 4 / 64)])
def test_bytes_are_those_of_codes_and_scales_also_without_values(bits: str, bytes_a_number: float) -> None:
    for device in (CPU, torch.device("meta")):
        found = QuantizedLinear(layer().to(device), FORMATS[bits], device)
        assert sum(buffer.nbytes for buffer in found.buffers()) == 128 * 96 * bytes_a_number
        assert found.weight.device == device
        assert found.weight.shape == (96, 128)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 3, bias=False)) for _ in range(2)])
        self.head = nn.Linear(16, 16)


def test_layers_of_blocks_are_quantised_and_heads_and_odd_sizes_are_not() -> None:
    network: Any = Network().requires_grad_(False)
    quantize({"network": network}, "8bit", CPU, kept=CPU)
    assert [type(block[0]) for block in network.blocks] == [QuantizedLinear] * 2
    assert [type(block[1]) for block in network.blocks] == [nn.Linear] * 2
    assert type(network.head) is nn.Linear
    before = network.blocks[0][0]
    quantize({"network": network}, "4bit", CPU, kept=CPU)
    assert network.blocks[0][0] is before, "what is quantised stays as it is"
    whole: Any = Network()
    quantize({"network": whole}, "full", CPU, kept=CPU)
    assert not quantized_layers(whole)
