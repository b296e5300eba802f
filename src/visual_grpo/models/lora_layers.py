"""The arithmetic of LoRA layers: in the precision of the frozen layer, in few kernels while sampling.

A and B stay in float32, as they are trained. In a float32 layer with gradient, peft's own forward computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from visual_grpo.models.quantized import QuantizedLinear


def compute_in_base_precision(model: nn.Module) -> None:
    """Makes LoRA layers on half-precision weights compute as `_lora_forward`, with gradient to their float32 factors.

    peft computes the product in float32, which on a GPU takes about as long as the layer itself.
    """
    for layer in lora_layers(model):
        if _compute_dtype(layer) != torch.float32:
            layer.forward = partial(_half_precision_forward, layer)


def _half_precision_forward(layer: Any, x: Tensor) -> Tensor:
    return _lora_forward(layer.get_base_layer(), [] if layer.disable_adapters else _factors(layer), x)


@contextmanager
def fast_lora(model: nn.Module) -> Iterator[None]:
    """Makes LoRA layers compute y = W x + b + s B (A x) in three kernels in the block; use it under ``torch.no_grad``.

    A and s B are rounded to the precision of W once. Weights are not merged: half precision would round the update
    away, quantized weights cannot hold it, and sharded ones are gathered for one call at a time. Layers whose adapter
    is off are left alone, and compiled ones, which would be compiled again for each rollout's factors.
    """
    layers = [] if is_compiled(model) else [layer for layer in lora_layers(model) if not layer.disable_adapters]
    before = [layer.__dict__.get("forward") for layer in layers]
    try:
        with torch.no_grad():
            for layer in layers:
                layer.forward = partial(_lora_forward, layer.get_base_layer(), _factors(layer))
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward


def _factors(layer: Any) -> list[tuple[Tensor, Tensor]]:
    """A^T [in, r] and s B^T [r, out] of each active adapter, in the precision of W."""
    dtype = _compute_dtype(layer)
    return [
        (
            layer.lora_A[name].weight.t().to(dtype),
            (layer.lora_B[name].weight * layer.scaling[name]).t().to(dtype),
        )
        for name in layer.active_adapters
        if name in layer.lora_A
    ]


def _compute_dtype(layer: Any) -> torch.dtype:
    base = layer.get_base_layer()
    return base.compute_dtype if isinstance(base, QuantizedLinear) else base.weight.dtype


def _lora_forward(base: Any, factors: Sequence[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    y = base(rows)
    for down, up in factors:
        y.addmm_(rows @ down, up)
    return y.view(*x.shape[:-1], y.shape[-1])


def is_compiled(network: nn.Module) -> bool:
    return any(block._compiled_call_impl is not None for block in network.modules())


def lora_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]
