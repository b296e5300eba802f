"""Counts memory and operations by phase while a model runs on the meta device.

Libraries read small tensors of whole numbers (positions, masks, counts, grids) on the host, and shapes follow from
them. So these are real tensors on the CPU, wherever a program asks for them, and have no values only where they are
computed from tensors without any. torch's FakeTensorMode keeps no values: it raises DataDependentOutputException at the
first order of prompts, `torch.randperm(...).tolist()`, whatever the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from visual_grpo.common.phases import Watcher, watched_by

OUTSIDE = "other"
"""Phase of the work that belongs to no other."""
_LARGEST = 2**20
"""Elements of a tensor that is kept on the CPU."""
_WHOLE = (torch.int64, torch.int32, torch.bool)
_RIDGE = 150
"""Operations a byte at which a GPU's arithmetic takes as long as its memory; 100 to 400 in half precision."""
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
    """Bytes that kernels read and write that compute less than `_RIDGE` a byte: the rest are bound by arithmetic."""


class Meter(Watcher, TorchDispatchMode):
    """Counts every operation on meta tensors inside `counting`.

    An unknown number is 0; unknown truth values are True where they are copied to the host and False where one is asked
    for, so that generated answers have their greatest length and gradients are finite.
    """

    shortens = True

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.copied_from_host = 0
        """Bytes copied from the host to networks that are offloaded."""
        self.phases: dict[str, Phase] = {}
        self._weight, self._captured = 1.0, False
        self._held: set[int] = set()
        self._path = [OUTSIDE]

    @property
    def peak(self) -> int:
        return max((phase.peak for phase in self.phases.values()), default=self.live)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts what happens inside, in the phases that it marks."""
        with watched_by(self), self:
            yield

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Counts tensors of the device, each memory once."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._held:
                self._held.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._path.append(name)
        self._row().peak = max(self._row().peak, self.live)
        try:
            yield
        finally:
            self._row().rest = self.live
            self._path.pop()

    @contextmanager
    def weighted(self, factor: float) -> Iterator[None]:
        """Peaks stay as they are."""
        before, self._weight = self._weight, self._weight * factor
        try:
            yield
        finally:
            self._weight = before

    @contextmanager
    def captured(self) -> Iterator[None]:
        self._captured = True
        try:
            yield
        finally:
            self._captured = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = _tensors_in((args, kwargs))
        on_device = [tensor.is_meta or tensor.untyped_storage()._cdata in self._held for tensor in inputs]
        asked = kwargs.get("device")
        result = _run(function, inputs, args, kwargs)
        # On the device stay what is asked for there, and what is computed from it and from plain numbers alone.
        alone = any(on_device) and all(
            here or (tensor.dim() == 0 and not tensor.requires_grad)
            for tensor, here in zip(inputs, on_device, strict=True)
        )
        if str(asked) == "meta" or (asked is None and alone):
            result = tree_map(_as_kept, result)
            self.hold(_tensors_in(result))
        outputs = _tensors_in(result)
        self.hold(tensor for tensor in outputs if tensor.is_meta)
        row = self._row()
        row.peak = max(row.peak, self.live)
        if any(on_device) and _starts_kernel(function, inputs, outputs):
            formula = flop_registry.get(function.overloadpacket)
            flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
            size = _bytes_of(inputs, outputs)
            row.kernels += self._weight
            row.captured += self._weight * self._captured
            row.flops += self._weight * flops
            row.moved += self._weight * size * (flops < _RIDGE * size)
        return result

    def _row(self) -> Phase:
        return self.phases.setdefault(self._path[-1], Phase())

    def _drop(self, key: int, size: int) -> None:
        self._held.discard(key)
        self.live -= size


def _run(function: Any, inputs: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
    """Runs an operation on the CPU where it only needs small whole numbers, else on the meta device."""
    packet, unknown = function.overloadpacket, any(tensor.is_meta for tensor in inputs)
    if packet is aten._to_copy:
        return _copied(function, args[0], kwargs)
    if _makes_tensor(function):
        return _made(function, args, kwargs)
    if packet in _INDEXED:
        args = (args[0], [position for index in args[1] for position in _positions(index)], *args[2:])
    if not unknown:
        return function(*args, **kwargs)
    if packet in (aten._local_scalar_dense, aten.equal):
        return torch.zeros((), dtype=args[0].dtype).item() if packet is aten._local_scalar_dense else False
    if packet in _VALUE_SHAPED:
        known = [torch.ones(a.shape, dtype=a.dtype) if isinstance(a, Tensor) and a.is_meta else a for a in args]
        return tree_map(_as_kept, function(*known, **kwargs))
    if function._schema.is_mutable and isinstance(args[0], Tensor) and not args[0].is_meta:
        return args[0].zero_()
    if not all(tensor.is_meta for tensor in inputs):
        args, kwargs = tree_map(lambda a: a.to("meta") if isinstance(a, Tensor) else a, (args, kwargs))
    return function(*args, **kwargs)


def _copied(function: Any, tensor: Tensor, kwargs: Any) -> Tensor:
    device, dtype = kwargs.get("device") or tensor.device, kwargs.get("dtype") or tensor.dtype
    if tensor.is_meta and device.type == "cpu":
        return torch.full(tensor.shape, tensor.dtype == torch.bool, dtype=dtype)
    if not tensor.is_meta and device.type == "meta" and _is_kept(tensor.to("meta", dtype)):
        return tensor.to(dtype, copy=True)
    copied: Tensor = function(tensor, **kwargs)
    return copied


def _made(function: Any, args: Any, kwargs: Any) -> Tensor:
    made: Tensor = function(*args, **kwargs)
    if not made.is_meta or not _is_kept(made):
        return made
    shaped = [torch.empty(a.shape, dtype=a.dtype) if isinstance(a, Tensor) else a for a in args]
    made = function(*shaped, **kwargs | {"device": torch.device("cpu")})
    return made.zero_() if function.overloadpacket in _ALLOCATIONS else made


@cache
def _makes_tensor(function: Any) -> bool:
    """True if it needs shapes alone: of a size that is given, or like a tensor."""
    return any(argument.name == "device" for argument in function._schema.arguments)


def _as_kept(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) and value.is_floating_point() else value


def _is_kept(tensor: Tensor) -> bool:
    return tensor.dtype in _WHOLE and tensor.numel() <= _LARGEST


def _positions(index: Tensor | None) -> Sequence[Tensor | None]:
    """Replaces a mask by the positions of its true values; unknown values are taken to be true."""
    if index is None or index.dtype != torch.bool:
        return [index]
    return (torch.ones(index.shape, dtype=torch.bool) if index.is_meta else index).nonzero(as_tuple=True)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *rest: Any, **given: Any) -> Tensor:
    if mask is not None:
        mask = mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    causal, scale = rest[1] if len(rest) > 1 else False, given.get("scale")
    fused = aten._scaled_dot_product_flash_attention_for_cpu
    return fused(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)[0]


_ATEN = torch.library.Library("aten", "IMPL")
_ATEN.impl("scaled_dot_product_attention", _attend, "AutogradMeta")
"""Fused on the meta device, as on other devices: the unfused formula's memory grows with the square of the length."""


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
