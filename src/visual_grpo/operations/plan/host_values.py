"""Values of small integer tensors on the meta device: positions, masks, counts, grids.

Libraries read them on the host, and shapes follow from them. Each operation on them is repeated on CPU copies, which
share memory where the tensors do.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_LARGEST = 2**20
"""Elements."""
_OF_SHAPES = {"ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full"}
"""Operations that need only the shape of their first argument."""


class _UnknownValueError(Exception):
    """An operation needs the values of a tensor that has none."""


class HostValues:
    """CPU copies by the memory of the tensors."""

    def __init__(self) -> None:
        self._of: dict[int, Tensor] = {}

    def value(self, tensor: Tensor) -> Tensor | None:
        """Returns the CPU copy; None where the values are unknown."""
        if not tensor.is_meta:
            return tensor
        flat = self._of.get(tensor.untyped_storage()._cdata)
        if flat is None or flat.dtype != tensor.dtype:
            return None
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def shaped(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function whose result's shape depends on values; unknown ones are taken to be 1."""
        try:
            result = function(*self._known(args), **self._known(kwargs))
        except _UnknownValueError:
            ones = [torch.ones(a.shape, dtype=a.dtype) if isinstance(a, Tensor) else a for a in args]
            result = function(*ones, **kwargs)
        return tree_map(self.on_device, result)

    def on_device(self, value: Tensor) -> Tensor:
        """Returns a meta tensor with this value."""
        tensor = torch.empty(value.shape, dtype=value.dtype, device="meta")
        if not value.is_floating_point() and value.numel():
            self._keep(tensor, value)
        return tensor

    def follow(
        self, function: Any, args: Any, kwargs: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """Repeats on the copies what ``function`` did with the tensors."""
        if not any(_has_values(tensor) for tensor in outputs):
            return
        old = {tensor.untyped_storage()._cdata for tensor in inputs}
        new = [tensor.untyped_storage()._cdata not in old for tensor in outputs]
        if not any(new) and not function._schema.is_mutable:
            return  # A view shares the copy's memory.
        if function._schema.name.partition("::")[2] in _OF_SHAPES:
            args = (torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:])
        try:
            copies = tree_leaves(function(*self._known(args), **self._known(kwargs)))
        except (_UnknownValueError, NotImplementedError):
            for tensor in outputs:
                self._of.pop(tensor.untyped_storage()._cdata, None)
            return
        for tensor, is_new, copy in zip(outputs, new, copies, strict=True):
            if is_new and _has_values(tensor):
                self._keep(tensor, copy)

    def _known(self, arguments: Any) -> Any:
        """Replaces meta tensors by their copies."""

        def known(argument: Any) -> Any:
            value = self.value(argument) if isinstance(argument, Tensor) else argument
            if value is None and argument is not None:
                raise _UnknownValueError
            return torch.device("cpu") if isinstance(argument, torch.device) else value

        return tree_map(known, arguments)

    def _keep(self, tensor: Tensor, value: Tensor) -> None:
        storage = tensor.untyped_storage()
        flat = torch.zeros(storage.nbytes() // tensor.itemsize, dtype=tensor.dtype)
        flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(value)
        if storage._cdata not in self._of:
            weakref.finalize(storage, self._of.pop, storage._cdata, None)
        self._of[storage._cdata] = flat


def _has_values(tensor: Tensor) -> bool:
    if not tensor.is_meta or tensor.is_floating_point() or tensor.is_complex():
        return False
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() <= _LARGEST * tensor.itemsize
