"""LoRA's product with as few kernels as it takes.

For sampling in half precision: peft casts the input to the adapter's float32 and back and adds in another kernel: seven
for each layer where the plain layer has one, and decoding token by token is bound by launching them. Here they are
three, in the model's precision. Folding the adapter into the weights would need only one, but half precision would
round most of it away, and weights of 8 or 4 bits all of it.

For training in single precision: peft's update is four more passes through a tensor of the layer's output forward and
as many backward. Here forward is one product with the folded weight, which is what tokens are drawn with too, and
backward asks for A's and B's gradients only in the orientations that a CPU is quick at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from visual_grpo.hardware.quantised import QuantisedLinear


@contextlib.contextmanager
def three_kernels(layers: Sequence[Any]) -> Iterator[None]:
    """Inside the block peft's ``layers`` compute y = W x + b + s B (A x) with A and s B rounded to W's precision.

    The update's own precision falls to 8 bits (bfloat16), that of the sum stays what it is. Without gradient. Layers
    whose adapter is off are left alone.
    """
    changed = [layer for layer in layers if not layer.disable_adapters]
    try:
        for layer in changed:
            layer.forward = partial(_forward, layer.get_base_layer(), _factors(layer))
        yield
    finally:
        for layer in changed:
            layer.__dict__.pop("forward", None)


def _factors(layer: Any) -> list[tuple[Tensor, Tensor]]:
    """A^T [in, r] and s B^T [r, out] of each active adapter."""
    base = layer.get_base_layer()
    dtype = base.compute_dtype if isinstance(base, QuantisedLinear) else base.weight.dtype
    return [
        (
            layer.lora_A[name].weight.detach().t().to(dtype),
            (layer.lora_B[name].weight.detach() * layer.scaling[name]).t().to(dtype),
        )
        for name in layer.active_adapters
        if name in layer.lora_A
    ]


@torch.no_grad()
def _forward(base: Any, factors: Sequence[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
    y: Tensor = base(x)
    flat = y.reshape(-1, y.shape[-1])
    for down, up in factors:
        flat = torch.addmm(flat, x.reshape(-1, x.shape[-1]) @ down, up)
    return flat.view(y.shape)


@contextlib.contextmanager
def folded(layers: Sequence[Any]) -> Iterator[None]:
    """Inside the block peft's ``layers`` compute y = (W + s B A) x + b, with gradient for A, B and x.

    Layers in half precision, and those whose adapter is off, merged or more than A and B, are left alone.
    """
    changed = [layer for layer in layers if _is_plain(layer)]
    try:
        for layer in changed:
            [name] = layer.active_adapters
            layer.forward = partial(
                _folded, layer.get_base_layer(), layer.lora_A[name], layer.lora_B[name], layer.scaling[name]
            )
        yield
    finally:
        for layer in changed:
            layer.__dict__.pop("forward", None)


def _is_plain(layer: Any) -> bool:
    from peft.tuners.lora import Linear

    if not isinstance(layer, Linear) or layer.disable_adapters or layer.merged or len(layer.active_adapters) != 1:
        return False
    [name] = layer.active_adapters
    parts = (layer.get_base_layer(), layer.lora_A[name], layer.lora_B[name])
    return (
        all(type(part) is nn.Linear and part.weight.dtype == torch.float32 for part in parts)
        and layer.lora_B[name].bias is None
        and isinstance(layer.lora_dropout[name], nn.Identity)
        and name not in layer.lora_variant
    )


def _folded(base: nn.Linear, down: nn.Linear, up: nn.Linear, scale: float, x: Tensor) -> Tensor:
    y: Tensor = _Folded.apply(x, base.weight, base.bias, down.weight, up.weight, scale)
    return y


class _Folded(torch.autograd.Function):
    """(W + scale B A) x + b for x [..., in], frozen W [out, in] and b [out], A [r, in] and B [out, r]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
    ) -> Tensor:
        # The folded weight is not kept: one of each layer would be a second model in memory.
        ctx.save_for_backward(x, weight, down, up)
        ctx.scale = scale
        return linear(x, torch.addmm(weight, up, down, alpha=scale), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor, None]:
        x, weight, down, up = ctx.saved_tensors
        flat, of_output = x.reshape(-1, x.shape[-1]), outputs[0].reshape(-1, len(weight))
        of_inner = (up * ctx.scale).t() @ of_output.t()  # [r, rows]
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = (of_output @ torch.addmm(weight, up, down, alpha=ctx.scale)).view(x.shape)
        of_up = ((down @ flat.t()) @ of_output).t() * ctx.scale
        return of_x, None, None, of_inner @ flat, of_up, None
