"""Counts memory and operations by phase while a model runs on the meta device.

Libraries read small integer tensors (positions, masks, counts, grids) on the host, and shapes follow from them.
`HostValues` repeats each operation on CPU copies of them, which share memory where the tensors do.

torch's own counters agree where they count, and do not do the rest. The formulas are those of its FlopCounterMode,
which counts no bytes read and written, multiplies nothing, and knows modules but no phases. Its MemTracker finds the
same bytes alive, also by module only. Its FakeTensorMode raises an error where the host reads a tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

_LARGEST = 2**20
"""Elements."""
_RIDGE = 150
"""Operations a byte at which a GPU's arithmetic takes as long as its memory; 100 to 400 in half precision."""
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


OUTSIDE = "other"
"""Phase of the work that belongs to no other."""
aten = torch.ops.aten
_VALUE_SHAPED = {aten.nonzero, aten._unique2, aten.unique_consecutive, aten.masked_select, aten.repeat_interleave}
"""The shape of their result depends on values."""
_INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
_ALLOCATIONS = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}


@dataclass(kw_only=True)
class Phase:
    """Counted by `Meter`; `gpu_check.Stopwatch` measures seconds and the peak alone."""

    peak: int = 0
    """Bytes of all live tensors, weights included."""
    seconds: float = 0.0
    rest: int = 0
    """Bytes that are left when the phase ends; what is above them grows with its batch."""
    kernels: float = 0.0
    captured: float = 0.0
    """Kernels among these that a CUDA graph launches."""
    flops: float = 0.0
    moved: float = 0.0
    """Bytes that kernels read and write that compute less than `_RIDGE` a byte: the others are bound by arithmetic."""


class Meter(TorchDispatchMode):
    """Counts every operation on meta tensors inside the ``with`` block.

    Host reads are answered from ``values``. An unknown number is 0; unknown truth values are True where they are copied
    and False where one is asked for, so that generated answers have their greatest length and gradients are finite.
    """

    def __init__(self, values: HostValues | None = None) -> None:
        super().__init__()
        self.live = 0
        self.copied_from_host = 0
        """Bytes copied from the host to networks that are offloaded."""
        self.weight = 1.0
        """Real operations that each counted one stands for."""
        self.phases: dict[str, Phase] = {}
        self._values = values or HostValues()
        self._held: set[int] = set()
        self._captures = False
        self._path = [OUTSIDE]

    @property
    def peak(self) -> int:
        return max((phase.peak for phase in self.phases.values()), default=self.live)

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Counts meta tensors, each memory once."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.is_meta and storage._cdata not in self._held:
                self._held.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Assigns what happens inside to ``name`` alone, also within another phase."""
        self._path.append(name)
        self._row().peak = max(self._row().peak, self.live)
        try:
            yield
        finally:
            self._row().rest = self.live
            self._path.pop()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Counts kernels as those of a CUDA graph."""
        self._captures = True
        try:
            yield
        finally:
            self._captures = False

    @contextmanager
    def weighted(self, factor: float) -> Iterator[None]:
        """Counts each operation ``factor`` times; peaks stay as they are."""
        before, self.weight = self.weight, self.weight * factor
        try:
            yield
        finally:
            self.weight = before

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = _tensors_in((args, kwargs))
        on_device = any(tensor.is_meta for tensor in inputs)
        result = self._run(function, args, kwargs) if on_device else function(*args, **kwargs)
        outputs = _tensors_in(result)
        self.hold(outputs)
        row = self._row()
        row.peak = max(row.peak, self.live)
        if (on_device or any(tensor.is_meta for tensor in outputs)) and _starts_kernel(function, inputs, outputs):
            formula = flop_registry.get(function.overloadpacket)
            flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
            size = _bytes_of(inputs, outputs)
            row.kernels += self.weight
            row.captured += self.weight * self._captures
            row.flops += self.weight * flops
            row.moved += self.weight * size * (flops < _RIDGE * size)
        self._values.follow(function, args, kwargs, inputs, outputs)
        return result

    def _run(self, function: Any, args: Any, kwargs: Any) -> Any:
        packet = function.overloadpacket
        if packet is aten._to_copy and torch.device(kwargs.get("device") or "meta").type == "cpu":
            value, dtype = self._values.value(args[0]), kwargs.get("dtype") or args[0].dtype
            if value is None:
                return torch.full(args[0].shape, args[0].dtype == torch.bool, dtype=dtype)
            return value.to(dtype, copy=True)
        if packet is aten._local_scalar_dense:
            value = self._values.value(args[0])
            return args[0].dtype.is_floating_point * 0.0 if value is None else value.item()
        if packet is aten.equal:
            first, second = (self._values.value(tensor) for tensor in args[:2])
            return first is not None and second is not None and torch.equal(first, second)
        if packet in _VALUE_SHAPED:
            return self._values.shaped(function, args, kwargs)
        if packet in _INDEXED:
            args = (args[0], [number for index in args[1] for number in self._numbers(index)], *args[2:])
        return function(*args, **kwargs)

    def _numbers(self, index: Tensor | None) -> list[Tensor | None]:
        """Replaces a mask by the positions of its true values."""
        if index is None or index.dtype != torch.bool:
            return [index]
        value = self._values.value(index)
        chosen = torch.ones(index.shape, dtype=torch.bool) if value is None else value
        return [self._values.on_device(number) for number in chosen.nonzero(as_tuple=True)]

    def _row(self) -> Phase:
        return self.phases.setdefault(self._path[-1], Phase())

    def _drop(self, key: int, size: int) -> None:
        self._held.discard(key)
        self.live -= size


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """Has meta tensors take fused attention, and keeps the values of numbers that ``torch.tensor`` puts on the meta
    device. The unfused formula's memory would grow with the square of the length."""
    attention, tensor = F.scaled_dot_product_attention, torch.tensor

    def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **given: Any) -> Tensor:
        if not query.is_meta:
            return attention(query, key, value, attn_mask, **given)
        if attn_mask is not None:
            attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
        causal, scale = given.get("is_causal", False), given.get("scale")
        fused = aten._scaled_dot_product_flash_attention_for_cpu
        return fused(query, key, value, 0.0, causal, attn_mask=attn_mask, scale=scale)[0]

    def read(data: Any) -> Any:
        if isinstance(data, list | tuple):
            return [read(each) for each in data]
        return data.item() if isinstance(data, Tensor) and not data.dim() else data

    def make(data: Any, *, device: Any = None, **given: Any) -> Tensor:
        if device is not None and torch.device(device).type == "meta":
            return tensor(read(data), device="cpu", **given).to("meta")
        return tensor(data, device=device, **given)

    # Not a TorchFunctionMode: torch leaves it in the backward pass, where checkpoints run attention again.
    with patch.object(F, "scaled_dot_product_attention", attend), patch.object(torch, "tensor", make):
        yield


def _tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _starts_kernel(function: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Views and bare allocations cost nothing."""
    if function.overloadpacket in _ALLOCATIONS:
        return False
    own = {tensor.untyped_storage()._cdata for tensor in inputs}
    return function._schema.is_mutable or any(t.untyped_storage()._cdata not in own for t in outputs)


def _bytes_of(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Each tensor once; an expanded one has no more bytes than its memory."""
    distinct = {id(tensor): tensor for tensor in (*inputs, *outputs)}.values()
    return sum(min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes()) for tensor in distinct)
