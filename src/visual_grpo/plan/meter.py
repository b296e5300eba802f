"""Counts what an operation after operation costs, phase by phase, while a model runs on tensors without values."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from visual_grpo.plan.call_site import call_site
from visual_grpo.plan.host_values import HostValues
from visual_grpo.plan.operations import aten, bytes_of, flops_of, starts_kernel, tensors_in

OUTSIDE = "other"
"""The phase of what belongs to none."""
_VALUE_SHAPED = {
    *(aten.nonzero, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.masked_select),
    aten.repeat_interleave,
}
"""The shape of their result depends on values, so that the host waits for it."""
_INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
_MAY_MIX = {*_INDEXED, aten._to_copy, aten.copy_}
"""They take tensors of the host beside the device's: they copy them."""


@dataclass(kw_only=True)
class Phase:
    """What happened in a phase of a step, as often as it happens in a real one."""

    peak: int = 0
    """Bytes of all live tensors at once, the weights' among them."""
    flops: float = 0.0
    bytes: float = 0.0
    kernels: float = 0.0
    gathered: float = 0.0
    """Bytes that came from other cards, which keep parts of the layers."""
    waits: float = 0.0
    """How often the host waits for a value of the device."""
    work: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(FLOPs, bytes) of a kernel -> how many of them."""


class Meter(TorchDispatchMode):
    """Of the tensors on one device, ``meta`` or (to hold a plan against a real run) ``cpu``.

    What the host asks of a tensor without values is answered: by its value where that is known (`HostValues`), else by
    0, of a truth value by "all are" where it is copied and by "no" where it is asked for alone. So every generated
    answer has its greatest length, and every gradient is finite.
    """

    def __init__(self, device: str = "meta", values: HostValues | None = None) -> None:
        """``values``: what other meters have learned of tensors that are still there."""
        super().__init__()
        self.device = device
        self.live = 0
        self.brought = 0
        """Bytes that were copied from the host to networks that take turns."""
        self.weight = 1.0
        """How many real operations each one stands for."""
        self.phases: dict[str, Phase] = {}
        self.waits: Counter[str] = Counter()
        """Source line -> how often the host waits there in a step."""
        self.mixed: Counter[str] = Counter()
        """Operation and source line -> how often it got tensors of two devices, which a GPU refuses."""
        self._values = values or HostValues()
        self._held: set[int] = set()
        self._path = [OUTSIDE]

    @property
    def peak(self) -> int:
        return max((phase.peak for phase in self.phases.values()), default=self.live)

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Counts what was there before."""
        for tensor in tensors:
            if tensor.device.type == self.device:
                self._hold(tensor)

    def gather(self, count: float) -> None:
        """So many bytes come from other cards."""
        self._row().gathered += self.weight * count

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Within another phase what happens belongs to this one alone."""
        self._path.append(name)
        self._row().peak = max(self._row().peak, self.live)
        try:
            yield
        finally:
            self._path.pop()

    @contextmanager
    def weighted(self, factor: float) -> Iterator[None]:
        """Each operation stands for so many; peaks are what they are."""
        before, self.weight = self.weight, self.weight * factor
        try:
            yield
        finally:
            self.weight = before

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # It hands over operations that are made of others.
            with self:
                parts = function.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        inputs = list(tensors_in((args, kwargs)))
        if self.device == "meta" and any(tensor.device.type == "meta" for tensor in inputs):
            result = self._without_values(function, args, kwargs, inputs)
        else:
            result = function(*args, **kwargs)
        outputs = list(tensors_in(result))
        self._note(function, args, kwargs, inputs, outputs, result)
        if self.device == "meta":
            self._values.follow(function, args, kwargs, outputs)
        return result

    def _without_values(self, function: Any, args: Any, kwargs: Any, inputs: Sequence[Tensor]) -> Any:
        packet = function.overloadpacket
        if packet is aten._to_copy and torch.device(kwargs.get("device") or "meta").type == "cpu":
            self._wait()
            return self._copied(args[0], kwargs)
        if packet is aten._local_scalar_dense:
            self._wait()
            value = self._values.value(args[0])
            return args[0].dtype.is_floating_point * 0.0 if value is None else value.item()
        if packet is aten.equal:
            self._wait()
            first, second = (self._values.value(tensor) for tensor in args[:2])
            return first is not None and second is not None and torch.equal(first, second)
        if packet in _VALUE_SHAPED:
            self._wait()
            return self._shaped_by_values(function, args, kwargs)
        if packet in _INDEXED:
            args = (args[0], self._by_number(args[1]), *args[2:])
        elif packet not in _MAY_MIX and any(tensor.device.type == "cpu" and tensor.dim() for tensor in inputs):
            self.mixed[f"{packet} at {call_site()}"] += 1
            args, kwargs = _on_meta(args), _on_meta(kwargs)
        return function(*args, **kwargs)

    def _copied(self, tensor: Tensor, kwargs: Any) -> Tensor:
        """To the host."""
        value, dtype = self._values.value(tensor), kwargs.get("dtype") or tensor.dtype
        if value is not None:
            return value.to(dtype, copy=True)
        return torch.full(tensor.shape, tensor.dtype == torch.bool, dtype=dtype)

    def _shaped_by_values(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Where the values are not known, all are taken to be 1."""
        try:
            result = function(*self._values.values(args), **self._values.values(kwargs))
        except KeyError:
            ones = [torch.ones(a.shape, dtype=a.dtype) if isinstance(a, Tensor) else a for a in args]
            result = function(*ones, **kwargs)
        if isinstance(result, tuple):
            return tuple(self._on_device(tensor) for tensor in result)
        return self._on_device(result)

    def _on_device(self, value: Tensor) -> Tensor:
        tensor = torch.empty(value.shape, dtype=value.dtype, device="meta")
        if not value.is_floating_point() and value.numel():
            self._values.keep(tensor, value)
        return tensor

    def _by_number(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Truth values among indices as the numbers of those that are true, for which a device has to be asked."""
        numbers: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype != torch.bool:
                numbers.append(index)
                continue
            if index.device.type == "meta":
                self._wait()
            value = self._values.value(index)
            chosen = torch.ones(index.shape, dtype=torch.bool) if value is None else value
            numbers += [self._on_device(number) for number in chosen.nonzero(as_tuple=True)]
        return numbers

    def _wait(self) -> None:
        self.waits[call_site()] += round(self.weight) or 1
        self._row().waits += self.weight

    def _note(
        self, function: Any, args: Any, kwargs: Any, inputs: list[Tensor], outputs: list[Tensor], result: Any
    ) -> None:
        own = [tensor for tensor in outputs if tensor.device.type == self.device]
        for tensor in own:
            self._hold(tensor)
        row = self._row()
        row.peak = max(row.peak, self.live)
        taking_part = own or [tensor for tensor in inputs if tensor.device.type == self.device]
        if not taking_part or not starts_kernel(function, inputs, outputs):
            return
        flops, moved = flops_of(function, args, kwargs, inputs, result), bytes_of(inputs, outputs)
        row.kernels += self.weight
        row.flops += self.weight * flops
        row.bytes += self.weight * moved
        row.work[flops, moved] += self.weight  # type: ignore[assignment]

    def _row(self) -> Phase:
        return self.phases.setdefault(self._path[-1], Phase())

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._held:
            return
        self._held.add(storage._cdata)
        size = storage.nbytes()
        self.live += size
        weakref.finalize(storage, self._drop, storage._cdata, size)

    def _drop(self, key: int, size: int) -> None:
        self._held.discard(key)
        self.live -= size


def _on_meta(values: Any) -> Any:
    """Arguments with all tensors on the device, so that a plan goes on where a GPU would refuse them."""
    if isinstance(values, Tensor):
        return values.to("meta")
    if isinstance(values, list | tuple):
        return type(values)(_on_meta(each) for each in values)
    return {key: _on_meta(each) for key, each in values.items()} if isinstance(values, dict) else values
