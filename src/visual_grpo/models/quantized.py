"""Frozen Linear layers whose weights take 8 or 4 bits, by bitsandbytes (QLoRA, arXiv 2305.14314).

Each block of a weight has its largest absolute value as float32 and a code for each number: one of 256 even steps
(8 bits) or of the 16 quantiles of a normal distribution (NF4). Every product makes the weight again in the layer's own
precision, forward and backward: sampling, reference, replay and gradient see the same weight. The library's own layers
do not keep that: the 8-bit one rounds the input too, the 4-bit one takes a different kernel without gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visual_grpo.common.device import bitsandbytes
from visual_grpo.common.errors import UserError

BaseWeights = Literal["full", "8bit", "4bit"]
SETTING = "model.base_weights"


@dataclass(frozen=True)
class Format:
    """Stores weights."""

    name: str
    block: int
    """Numbers that share a scale."""
    codes_a_byte: int

    def fits(self, layer: nn.Linear) -> bool:
        """Needs whole blocks, and whole bytes in a row."""
        return layer.weight.numel() % self.block == 0 and layer.in_features % self.codes_a_byte == 0

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Returns codes [numel / codes a byte] uint8 and scales [numel / block] float32."""
        if weight.is_meta:
            codes = weight.new_empty(weight.numel() // self.codes_a_byte, dtype=torch.uint8)
            return codes, weight.new_empty(weight.numel() // self.block, dtype=torch.float32)
        ops = torch.ops.bitsandbytes
        if self.name == "4bit":
            codes, scales = ops.quantize_4bit(weight, self.block, "nf4", torch.uint8)
        else:
            codes, scales = ops.quantize_blockwise(weight, _even_steps(weight.device), self.block)
        return codes.flatten(), scales

    def dequantize(self, codes: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Returns the weight, [out, in]."""
        if codes.is_meta:
            return codes.new_zeros(shape, dtype=dtype)  # One kernel, for a plan.
        ops = torch.ops.bitsandbytes
        if self.name == "4bit":
            return cast(Tensor, ops.dequantize_4bit(codes, scales, self.block, "nf4", shape, dtype))
        steps = _even_steps(codes.device)
        return cast(Tensor, ops.dequantize_blockwise(codes, scales, steps, self.block, dtype)).view(shape)


FORMATS: Mapping[str, Format] = {"8bit": Format("8bit", 256, 1), "4bit": Format("4bit", 64, 2)}


@cache
def _even_steps(device: torch.device) -> Tensor:
    """[256] float32 from -1 to 1; 0 is among them twice, since as many are below it as above."""
    half = torch.arange(128, dtype=torch.float32) / 127
    return torch.cat([-half.flip(0), half]).to(device)


class QuantizedLinear(nn.Linear):
    """A frozen ``nn.Linear`` of few bits a weight; its bias stays as it is."""

    codes: Tensor
    scales: Tensor

    def __init__(self, layer: nn.Linear, form: Format, device: torch.device) -> None:
        """Quantises on ``device``; ``layer`` keeps its weight."""
        nn.Module.__init__(self)  # Linear's own would make a weight.
        self.in_features, self.out_features, self.form = layer.in_features, layer.out_features, form
        self.compute_dtype = layer.weight.dtype
        """peft asks for the weight's dtype by this name."""
        codes, scales = form.quantize(layer.weight.detach().to(device).contiguous())
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.bias = layer.bias

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """[out, in], made again each time."""
        return self.form.dequantize(self.codes, self.scales, (self.out_features, self.in_features), self.compute_dtype)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear calls it.
        if torch.is_grad_enabled() and input.requires_grad:
            return cast(Tensor, _Product.apply(input, self.codes, self.scales, self.bias, self))
        return F.linear(input, self.weight, self.bias)


class _Product(torch.autograd.Function):
    """x W^T + b with a gradient for x alone, for which not W but its codes are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, layer: QuantizedLinear) -> Any:
        ctx.save_for_backward(codes, scales)  # The layer's own may be on a different device by then.
        ctx.layer = layer
        return F.linear(x, layer.weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        layer = ctx.layer
        shape = layer.out_features, layer.in_features
        weight = layer.form.dequantize(*ctx.saved_tensors, shape, layer.compute_dtype)
        return gradients[0] @ weight, None, None, None, None


def check_base_weights(base_weights: BaseWeights, device: torch.device) -> None:
    """Raises UserError where ``device`` cannot compute with them."""
    if base_weights != "full" and device.type != "meta":
        bitsandbytes(SETTING, base_weights, device)


@torch.no_grad()
def quantize(
    networks: Mapping[str, nn.Module], base_weights: BaseWeights, device: torch.device, *, kept: torch.device
) -> None:
    """Replaces the plain Linear layers in the networks' repeated blocks; heads and embeddings keep their precision.

    The codes are made on ``device``, which holds one full weight at a time, and put on ``kept``.
    """
    if base_weights == "full":
        return
    check_base_weights(base_weights, device)
    form = FORMATS[base_weights]
    for network in networks.values():
        for owner, name, layer in list(_layers(network)):
            if form.fits(layer):
                setattr(owner, name, QuantizedLinear(layer, form, device).to(kept))


def require_quantized(networks: Mapping[str, nn.Module], base_weights: BaseWeights) -> None:
    """Raises UserError naming each of the ``networks`` that was to be quantised and has no layer that is."""
    without = [name for name, network in networks.items() if not quantized_layers(network)]
    if base_weights != "full" and without:
        raise UserError(
            f"{SETTING} is {base_weights}, but there is nothing to quantise in {', '.join(without)}: expected"
            " nn.Linear layers in repeated blocks (an nn.ModuleList) whose weights are multiples of"
            f" {FORMATS[base_weights].block} numbers. Leave {SETTING} out; a family of your own calls"
            " visual_grpo.models.quantized.quantize in its load (load_pipeline does)."
        )


def quantized_layers(network: nn.Module) -> list[QuantizedLinear]:
    return [layer for layer in network.modules() if isinstance(layer, QuantizedLinear)]


def _layers(network: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """(owner, name in it, layer) of each plain Linear layer within a ModuleList, each once."""
    blocks = [block for block in network.modules() if isinstance(block, nn.ModuleList)]
    for owner in dict.fromkeys(owner for block in blocks for owner in block.modules()):
        for name, layer in owner.named_children():
            if type(layer) is nn.Linear:  # Other code reads subclasses in its own ways.
                yield owner, name, layer
