"""Frozen Linear layers whose weights take 8 or 4 bits, for bases that would not fit a card (QLoRA, arXiv 2305.14314).

A weight is cut into blocks; each has its largest absolute value as float32 and a code for each number, which names one
of 256 even steps (8 bits) or of the 16 quantiles of a normal distribution (NF4, 4 bits; section 3 of the paper). For
every product the weight is made again in the layer's own precision, forward and backward, and forgotten: so sampling,
reference, replay and gradient see one and the same weight, and the input is not rounded.

Codes and scales are plain buffers. What moves, pins, counts or copies a network needs to know nothing of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch import library as operators
from torch.nn import functional as F

from visual_grpo.errors import UserError
from visual_grpo.hardware.bits import bitsandbytes

BaseWeights = Literal["full", "8bit", "4bit"]
SETTING = "model.base_weights"

_DEQUANTISE = "visual_grpo::dequantise"
operators.define(_DEQUANTISE, "(Tensor codes, Tensor scales, SymInt[] shape, ScalarType dtype) -> Tensor")
operators.impl(_DEQUANTISE, "meta", lambda codes, scales, shape, dtype: codes.new_empty(shape, dtype=dtype))
"""What a plan counts: one kernel that reads codes and scales and writes a weight. It needs no library."""


@dataclass(frozen=True)
class Format:
    """How weights are stored."""

    name: str
    block: int
    """Numbers that share a scale."""
    codes_a_byte: int

    def fits(self, layer: nn.Linear) -> bool:
        """Whole blocks, and whole bytes in a row."""
        return layer.weight.numel() % self.block == 0 and layer.in_features % self.codes_a_byte == 0

    def quantise(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Codes [numel / codes a byte] uint8 and scales [numel / block] float32 of ``weight``."""
        if weight.device.type == "meta":
            codes = weight.new_empty(weight.numel() // self.codes_a_byte, dtype=torch.uint8)
            return codes, weight.new_empty(weight.numel() // self.block, dtype=torch.float32)
        ops = torch.ops.bitsandbytes
        if self.name == "4bit":
            codes, scales = ops.quantize_4bit(weight, self.block, "nf4", torch.uint8)
        else:
            codes, scales = ops.quantize_blockwise(weight, _even_steps(weight.device), self.block)
        return codes.flatten(), scales

    def dequantise(self, codes: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """The weight [out, in]."""
        if codes.device.type == "meta":
            return cast(Tensor, torch.ops.visual_grpo.dequantise(codes, scales, shape, dtype))
        ops = torch.ops.bitsandbytes
        if self.name == "4bit":
            return cast(Tensor, ops.dequantize_4bit(codes, scales, self.block, "nf4", shape, dtype))
        steps = _even_steps(codes.device)
        return cast(Tensor, ops.dequantize_blockwise(codes, scales, steps, self.block, dtype)).view(shape)


FORMATS: Mapping[str, Format] = {"8bit": Format("8bit", 256, 1), "4bit": Format("4bit", 64, 2)}

_STEPS: dict[torch.device, Tensor] = {}


def _even_steps(device: torch.device) -> Tensor:
    """[256] float32 from -1 to 1; 0 is among them, twice, since as many are below it as above."""
    if device not in _STEPS:
        half = torch.arange(128, dtype=torch.float32) / 127
        _STEPS[device] = torch.cat([-half.flip(0), half]).to(device)
    return _STEPS[device]


class QuantisedLinear(nn.Linear):
    """A frozen ``nn.Linear`` of few bits a weight, with its bias as it was."""

    codes: Tensor
    scales: Tensor

    def __init__(self, layer: nn.Linear, form: Format, device: torch.device) -> None:
        """The codes are made on ``device``, and stay there; ``layer`` keeps its weight."""
        nn.Module.__init__(self)  # Linear's own would make a weight.
        self.in_features, self.out_features, self.form = layer.in_features, layer.out_features, form
        self.compute_dtype = layer.weight.dtype
        """Of the weight that products are computed with; peft asks for it by this name."""
        codes, scales = form.quantise(layer.weight.detach().to(device).contiguous())
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.bias = layer.bias

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """[out, in], made again each time."""
        return self.form.dequantise(self.codes, self.scales, (self.out_features, self.in_features), self.compute_dtype)

    @property
    def elements(self) -> int:
        """Of the weight."""
        return self.in_features * self.out_features

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear calls it.
        if torch.is_grad_enabled() and input.requires_grad:
            return cast(Tensor, _Product.apply(input, self.codes, self.scales, self.bias, self))
        return F.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.form.name}, bias={self.bias is not None}"


class _Product(torch.autograd.Function):
    """x W^T + b with a gradient for x alone, for which not W but its codes are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, layer: QuantisedLinear) -> Any:
        ctx.save_for_backward(codes, scales)  # Where they are now: the layer's own may be elsewhere by then.
        ctx.layer = layer
        return F.linear(x, layer.weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        layer = ctx.layer
        shape = layer.out_features, layer.in_features
        weight = layer.form.dequantise(*ctx.saved_tensors, shape, layer.compute_dtype)
        return gradients[0] @ weight, None, None, None, None


def check_base_weights(base_weights: BaseWeights, device: torch.device) -> None:
    """Raises UserError where ``device`` cannot compute with them; to be called before weights are loaded."""
    if base_weights != "full" and device.type != "meta":
        bitsandbytes(SETTING, base_weights, device)


def quantise(
    networks: Mapping[str, nn.Module], base_weights: BaseWeights, device: torch.device, *, kept: torch.device
) -> None:
    """Puts `QuantisedLinear` in the place of the Linear layers in the networks' repeated blocks, one after the other,
    so that ``device`` holds the full weight of one layer at a time. Those that are quantised already are left alone.

    What is outside of the blocks, as heads and embeddings, keeps its precision: it is small, and errs most.

    Args:
        networks: by name; all on the host, or on the device called meta.
        device: where the codes are made.
        kept: where they are put.

    Raises:
        UserError: the library is missing, or has no kernels for ``device``.
    """
    if base_weights == "full":
        return
    check_base_weights(base_weights, device)
    form = FORMATS[base_weights]
    with torch.no_grad():
        for network in networks.values():
            for owner, name, layer in list(_layers(network)):
                if form.fits(layer):
                    setattr(owner, name, QuantisedLinear(layer, form, device).to(kept))


def require_quantised(networks: Mapping[str, nn.Module], base_weights: BaseWeights) -> None:
    """Raises UserError naming each of the ``networks`` that was to be quantised and has no layer that is."""
    if base_weights == "full":
        return
    without = [name for name, network in networks.items() if not quantised_layers(network)]
    if without:
        form = FORMATS[base_weights]
        raise UserError(
            f"{SETTING} is {base_weights}, but there is nothing to quantise in {', '.join(without)}: expected"
            f" nn.Linear layers in repeated blocks (an nn.ModuleList) whose weights are multiples of {form.block}"
            f" numbers. Leave {SETTING} out; a family of your own calls visual_grpo.hardware.quantised.quantise in its"
            " load (load_pipeline does)."
        )


def quantised_layers(network: nn.Module) -> list[QuantisedLinear]:
    """Those of a network, in its order."""
    return [layer for layer in network.modules() if isinstance(layer, QuantisedLinear)]


def _layers(network: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """(owner, name in it, layer) of each plain Linear layer within a ModuleList, each once."""
    blocks = [block for block in network.modules() if isinstance(block, nn.ModuleList)]
    owners = dict.fromkeys(owner for block in blocks for owner in block.modules())
    for owner in owners:
        for name, layer in owner.named_children():
            if type(layer) is nn.Linear:  # Subclasses are read by others in their own ways.
                yield owner, name, layer
