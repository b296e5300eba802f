"""Values of the small whole-number tensors on the meta device, which has none: positions, masks, counts, grids.

Libraries read such tensors on the host, and shapes of others follow from them. So each operation on them is also run on
copies on the CPU, which share memory where the tensors themselves do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from visual_grpo.plan.operations import tensors_in
from visual_grpo.plan.replaced import replaced

_LARGEST = 2**20
"""Elements."""
_OF_SHAPES = {"ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full"}
"""Operations that look at the shape of their first argument, not at its values."""


class _UnknownValueError(Exception):
    """Of a tensor of which an operation needs the values."""


@contextmanager
def literals_with_values() -> Iterator[None]:
    """``torch.tensor`` makes meta tensors of numbers whose values nobody has seen; here they are seen."""

    def tensor(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
            if device is not None and torch.device(device).type == "meta":
                return real(_read(data), device="cpu", **kwargs).to("meta")
            return real(data, device=device, **kwargs)

        return make

    with replaced(torch, "tensor", tensor):
        yield


def _read(data: Any) -> Any:
    """Numbers in the place of tensors of one: as on a GPU, the host waits for each."""
    if isinstance(data, list | tuple):
        return [_read(each) for each in data]
    return data.item() if isinstance(data, Tensor) and not data.dim() else data


class HostValues:
    """The copies, by the memory of the tensors."""

    def __init__(self) -> None:
        self._of: dict[int, Tensor] = {}

    def value(self, tensor: Tensor) -> Tensor | None:
        """The CPU copy in the shape of ``tensor``; None where its values are not known."""
        if tensor.device.type != "meta":
            return tensor
        flat = self._of.get(tensor.untyped_storage()._cdata)
        if flat is None or flat.dtype != tensor.dtype:
            return None
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def values(self, arguments: Any) -> Any:
        """Arguments with copies in the place of meta tensors; _UnknownValueError where one's values are not known."""
        if isinstance(arguments, Tensor):
            found = self.value(arguments)
            if found is None:
                raise _UnknownValueError
            return found
        if isinstance(arguments, list | tuple):
            return type(arguments)(self.values(each) for each in arguments)
        if isinstance(arguments, dict):
            return {key: self.values(each) for key, each in arguments.items()}
        return torch.device("cpu") if isinstance(arguments, torch.device) else arguments

    def follow(self, function: Any, args: Any, kwargs: Any, outputs: Sequence[Tensor]) -> None:
        """Does with the copies what ``function`` did with the tensors."""
        if not any(_has_values(tensor) for tensor in outputs):
            return
        known = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        new = [tensor.untyped_storage()._cdata not in known for tensor in outputs]
        if not any(new) and not function._schema.is_mutable:
            return  # A view, of memory that is followed already.
        if function._schema.name.partition("::")[2] in _OF_SHAPES:
            args = (torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:])
        try:
            results = list(tensors_in(function(*self.values(args), **self.values(kwargs))))
        except (_UnknownValueError, NotImplementedError):
            # Of an argument nothing is known, or there is no such kernel on a CPU: nothing is known of the results.
            for tensor in outputs:
                self._of.pop(tensor.untyped_storage()._cdata, None)
            return
        for tensor, is_new, result in zip(outputs, new, results, strict=True):
            if is_new and _has_values(tensor):
                self.keep(tensor, result)

    def keep(self, tensor: Tensor, value: Tensor) -> None:
        """``value`` is what the new ``tensor`` holds."""
        storage = tensor.untyped_storage()
        flat = torch.zeros(storage.nbytes() // tensor.itemsize, dtype=tensor.dtype)
        flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(value)
        if storage._cdata not in self._of:
            weakref.finalize(storage, self._of.pop, storage._cdata, None)
        self._of[storage._cdata] = flat


def _has_values(tensor: Tensor) -> bool:
    if tensor.device.type != "meta" or tensor.is_floating_point() or tensor.is_complex():
        return False
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() <= _LARGEST * tensor.itemsize
