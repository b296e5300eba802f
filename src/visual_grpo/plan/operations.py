"""What one tensor operation costs: floating-point operations, bytes read and written, kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
_ATTENTION = {
    aten._scaled_dot_product_flash_attention: (0, 2),
    aten._scaled_dot_product_flash_attention_for_cpu: (0, 2),
    aten._scaled_dot_product_efficient_attention: (0, 2),
    # Their first argument is the gradient of the output.
    aten._scaled_dot_product_flash_attention_backward: (1, 5),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (1, 5),
    aten._scaled_dot_product_efficient_attention_backward: (1, 5),
}
"""Fused attention: the position of the queries among the tensors, and the products of its size (two forward, queries
with keys and weights with values; five backward, which forms the weights once more)."""
_NO_KERNEL = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
"""Only set memory aside."""


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Those among arguments or results, also in lists."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from tensors_in(value)


def starts_kernel(function: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Whether the device computes or copies something; a view of what is there costs nothing."""
    if function.overloadpacket in _NO_KERNEL:
        return False
    if function._schema.is_mutable:
        return True
    own = {tensor.untyped_storage()._cdata for tensor in inputs}
    return any(tensor.untyped_storage()._cdata not in own for tensor in outputs)


def flops_of(function: Any, args: Any, kwargs: Any, inputs: Sequence[Tensor], result: Any) -> int:
    """Of matrix products, convolutions and attention, a multiplication and an addition as two; 0 for all else."""
    packet = function.overloadpacket
    if packet in _ATTENTION:
        first, products = _ATTENTION[packet]
        query, key = inputs[first], inputs[first + 1]
        return products * 2 * query.numel() * key.shape[2]
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    return 0


def bytes_of(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Read and written, each tensor once; an expanded one has no more bytes than its memory."""
    distinct = {id(tensor): tensor for tensor in (*inputs, *outputs)}.values()
    return sum(min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes()) for tensor in distinct)
