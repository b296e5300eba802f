"""Cheaper forwards of layers with LoRA while sampling, without gradient: merged weights, or three kernels a layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from visual_grpo.grpo.distributed import sharding
from visual_grpo.models.quantized import QuantisedLinear


@contextmanager
def merged(model: nn.Module) -> Iterator[None]:
    """Any adapter of ``model`` folded into the weights while sampling: one matrix product instead of three.

    Afterwards the weights are put back from copies, since adding and subtracting would leave rounding behind. In half
    precision merging rounds the update away, and so it would in 8 or 4 bits, and sharded weights are gathered for one
    call at a time: there it is `three_kernels`.
    """
    layers = lora_layers(model)
    bases = [layer.get_base_layer() for layer in layers]
    exact = all(not isinstance(b, QuantisedLinear) and b.weight.dtype == torch.float32 for b in bases)
    if sharding.active() or not exact:
        with three_kernels(layers):
            yield
        return
    originals = [base.weight.detach().clone() for base in bases]
    try:
        for layer in layers:
            if not layer.disable_adapters:  # Such a one would unmerge itself in its call.
                layer.merge()
        yield
    finally:
        for layer, weight in zip(layers, originals, strict=True):
            layer.merged_adapters.clear()
            layer.get_base_layer().weight.data.copy_(weight)


@contextmanager
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


def lora_layers(model: nn.Module) -> list[Any]:
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]
