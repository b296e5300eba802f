"""LoRA's product with as few kernels as it takes.

For sampling in half precision: peft casts the input to the adapter's float32 and back and adds in another kernel: seven
for each layer where the plain layer has one, and decoding token by token is bound by launching them. Here they are
three, in the model's precision. Merging the adapter into the weights would need only one, but half precision would
round most of it away, and weights of 8 or 4 bits all of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

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
