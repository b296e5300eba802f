"""A pretend GPU: tensors that say ``cuda:0`` and hold their values in host memory.

It refuses what CUDA refuses, an operation on tensors of two devices, and counts what makes the host and a GPU wait for
each other. It computes on the CPU, by the kernels that the CPU's own tensors take, so that results are equal bit for
bit. Forward, backward and optimiser run as they are.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tests.replacing import replaced

DEVICE = torch.device("cuda:0")
aten = torch.ops.aten
_SOURCES = f"{Path(__file__).parents[2]}/src/visual_grpo/"
_INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
_COPIES = {aten._to_copy, aten.copy_}
_ASKS = {
    *(aten._local_scalar_dense, aten.nonzero, aten._unique, aten._unique2, aten.unique_dim, aten.equal),
    *(aten.unique_consecutive, aten.masked_select, aten.bincount),
}
"""The host needs a value, or a shape that depends on values."""

_MADE_LIKE = {aten.new_zeros, aten.new_empty, aten.new_empty_strided, aten.zeros_like, aten.empty_like, aten.ones_like}
_LAZY = {aten._conj: aten.conj_physical.default, aten._neg_view: aten.neg.default}
"""Marks of a tensor that the wrapper would not carry; and what computes the values at once."""


class DeviceMixError(RuntimeError):
    """An operation got tensors of two devices, which CUDA refuses."""


class OnDevice(Tensor):
    """A tensor of the pretend GPU; ``held`` has its values.

    For C++ it is a CPU tensor, since autograd would ask a driver about a GPU's; for Python it is on the GPU.
    """

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        made: OnDevice = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=held.device,
        )
        made.held = held
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _METHODS.get(function, function)(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _PRESENT[-1].run(function, args, kwargs or {})

    def __repr__(self, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
        return f"OnDevice({self.held!r})"

    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)


class _Crossing(torch.autograd.Function):
    """A copy to the other side, whose gradient comes back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.leads_to_device = not isinstance(tensor, OnDevice)
        return _copied(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _copied(gradients[0])


def _copied(tensor: Tensor) -> Tensor:
    target = torch.device("cpu") if isinstance(tensor, OnDevice) else DEVICE
    return aten._to_copy(tensor, device=target)


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`Tensor.to`, which C++ would not know what to do with: for it all is on the CPU."""
    like = next((given for given in args if isinstance(given, Tensor)), kwargs.pop("other", None))
    rest = [given for given in args if not isinstance(given, Tensor)]
    if like is not None:
        rest = [like.device, like.dtype, *rest]
    copy = kwargs.pop("copy", False)
    device, dtype, _, layout = torch._C._nn._parse_to(*rest, **kwargs)
    here = isinstance(tensor, OnDevice)
    if not here and device is not None and device.type not in ("cpu", "cuda"):
        return _REAL_TO(tensor, device, dtype or tensor.dtype, copy=copy)
    crosses = device is not None and (device.type == "cuda") != here
    if not crosses:
        return _REAL_TO(tensor, dtype=dtype or tensor.dtype, copy=copy, memory_format=layout or torch.preserve_format)
    return _Crossing.apply(_REAL_TO(tensor, dtype=dtype or tensor.dtype, memory_format=layout or torch.preserve_format))


def _set_data(tensor: OnDevice, value: OnDevice) -> None:
    tensor.held = value.held


def _as_list(tensor: OnDevice) -> Any:
    _PRESENT[-1].note("device to host")
    return tensor.held.tolist()


def _as_array(tensor: OnDevice, *args: Any, **kwargs: Any) -> Any:
    raise TypeError(f"can't convert a tensor of {DEVICE} to numpy, {call_site()}: use Tensor.cpu() first")


def _getitem(tensor: Tensor, index: Any) -> Tensor:
    return _REAL_GETITEM(tensor, _indices(tensor, index))


def _setitem(tensor: Tensor, index: Any, value: Any) -> None:
    if isinstance(tensor, OnDevice) and not isinstance(value, Tensor):
        value = torch.full((), value, dtype=tensor.dtype, device=DEVICE)  # torch fills.
    _REAL_SETITEM(tensor, _indices(tensor, index), value)


def _indices(tensor: Tensor, index: Any) -> Any:
    """Those of the host are copied."""
    if isinstance(index, tuple):
        return tuple(_indices(tensor, each) for each in index)
    if isinstance(index, OnDevice) or not isinstance(tensor, OnDevice):
        return index
    if isinstance(index, list):
        index = torch.as_tensor(index)
    return index.to(DEVICE) if isinstance(index, Tensor) and index.dim() else index


def _pad_sequence(
    tensors: Sequence[Tensor], batch_first: bool = False, padding_value: float = 0.0, side: str = "right"
) -> Tensor:
    """torch's own makes its result where C++ takes the tensors to be."""
    assert batch_first
    assert side == "right"
    padded = tensors[0].new_full((len(tensors), max(map(len, tensors)), *tensors[0].shape[1:]), padding_value)
    for row, tensor in enumerate(tensors):
        padded[row, : len(tensor)] = tensor
    return padded


def _made_like(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """On the device of a tensor that is given, unless another is named."""

    def make(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("device") is None:
            kwargs["device"] = tensor.device
        return real(tensor, *args, **kwargs)

    return make


_NEW = (Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty)
_LIKE = (torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like, torch.rand_like, torch.randn_like)
_REAL_TO, _REAL_GETITEM, _REAL_SETITEM = Tensor.to, Tensor.__getitem__, Tensor.__setitem__
_METHODS: dict[Any, Callable[..., Any]] = {
    _REAL_TO: _to,
    Tensor.cpu: lambda tensor: _to(tensor, "cpu"),
    torch._C._nn.pad_sequence: _pad_sequence,
    _REAL_GETITEM: _getitem,
    _REAL_SETITEM: _setitem,
    Tensor.new_tensor: lambda tensor, data, **kwargs: torch.tensor(data, dtype=tensor.dtype, device=DEVICE),
    **{function: _made_like(function) for function in (*_NEW, *_LIKE)},
    Tensor.cuda: lambda tensor, *args, **kwargs: tensor,
    Tensor.data.__get__: lambda tensor: tensor.detach(),  # type: ignore[attr-defined]
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.tolist: _as_list,
    Tensor.numpy: _as_array,
    Tensor.__array__: _as_array,
    Tensor.get_device: lambda tensor: 0,
}
_PRESENT: list[Accelerator] = []


class Accelerator(TorchDispatchMode):
    """Inside the block there is a pretend GPU. ``transfers`` counts by (what, source line)."""

    def __init__(self) -> None:
        super().__init__()
        self.transfers: Counter[tuple[str, str]] = Counter()
        self.pinned = 0
        """Bytes."""
        self._stack = ExitStack()
        self.captured: list[tuple[Any, Any, Any, Any]] | None = None
        """What a CUDA graph is to launch again, while one is captured: (function, args, kwargs, results)."""

    def __enter__(self) -> Accelerator:
        _PRESENT.append(self)
        self._stack.enter_context(_pretending())
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        super().__exit__(*error)
        self._stack.close()
        _PRESENT.pop()

    def count(self, *files: str) -> int:
        """Of the transfers that source lines of these files ask for; without files, of all."""
        return sum(n for (_, where), n in self.transfers.items() if not files or where.split(":")[0] in files)

    def note(self, what: str) -> None:
        if self.captured is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}, {call_site()}")
        self.transfers[what, call_site()] += 1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(function, args, kwargs or {})

    def run(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """``function`` with values in the place of tensors, and its results on the device that they would be on."""
        tensors = [*tensors_in(args), *tensors_in(kwargs)]
        there = any(isinstance(tensor, OnDevice) for tensor in tensors)
        asked = kwargs.get("device")
        packet = function.overloadpacket
        if asked is not None and torch._C._current_graph_task_id() != -1:
            asked = _meant_backward(asked, packet, tensors)
        goes_there = torch.device(asked).type == "cuda" if asked is not None else there
        if there:
            _refuse_mixes(function, args, tensors)
            if packet in _ASKS or (packet is aten.repeat_interleave and kwargs.get("output_size") is None):
                self.note("device to host")
        _refuse_generators(function, kwargs, goes_there)
        self._note_copies(packet, args, there, goes_there)
        if asked is not None and (there or goes_there):
            kwargs = {**kwargs, "device": torch.device("cpu"), "pin_memory": False}
            if function._schema.name == "aten::_to_copy" or "pin_memory" not in _arguments(function):
                kwargs.pop("pin_memory")
        function = _LAZY.get(packet, function)
        results = function(*mapped(_held, args), **mapped(_held, kwargs))
        if not goes_there or packet is aten._local_scalar_dense:
            return results
        if self.captured is not None:
            self.captured.append((function, mapped(_held, args), mapped(_held, kwargs), results))
        same = {id(tensor.held): tensor for tensor in tensors if isinstance(tensor, OnDevice)}
        return mapped(lambda tensor: _there(tensor, same), results)

    def _note_copies(self, packet: Any, args: Any, there: bool, goes_there: bool) -> None:
        if packet is aten.copy_:
            if isinstance(args[0], OnDevice) != isinstance(args[1], OnDevice):
                self.note("host to device" if isinstance(args[0], OnDevice) else "device to host")
        elif packet is aten._to_copy:
            if goes_there != there:
                self.note("host to device" if goes_there else "device to host")
        elif packet in _INDEXED and there:
            for index in args[1]:
                if isinstance(index, OnDevice) and index.dtype == torch.bool:
                    self.note("device to host")  # How many are true.


class _Graph:
    """Launches what was captured, with the memory that it had."""

    launches: list[tuple[Any, Any, Any, Any]]

    def replay(self) -> None:
        for function, args, kwargs, results in self.launches:
            again = function(*args, **kwargs)
            for old, new in zip(tensors_in(results), tensors_in(again), strict=True):
                if old.data_ptr() != new.data_ptr():  # Neither a view nor written in place.
                    old.copy_(new)


@contextmanager
def _capture(graph: _Graph, capture_error_mode: str) -> Iterator[None]:
    assert capture_error_mode == "thread_local"  # Rewards may run in another thread.
    _PRESENT[-1].captured = graph.launches = []
    try:
        yield
    finally:
        _PRESENT[-1].captured = None


class _Stream:
    def __init__(self, device: Any = None) -> None:
        """torch asks for the device."""

    def wait_stream(self, other: _Stream) -> None:
        """All is done at once here."""


def _refuse_mixes(function: Any, args: Any, tensors: Sequence[Tensor]) -> None:
    packet, own = function.overloadpacket, [tensor for tensor in tensors if not isinstance(tensor, OnDevice)]
    if not own or packet in _COPIES:
        return
    pointwise = torch.Tag.pointwise in function.tags or "_foreach" in function._schema.name
    number = [tensor.dim() == 0 for tensor in own]
    if packet in _INDEXED:
        values = args[2:3]
        allowed = isinstance(args[0], OnDevice) and all(isinstance(v, OnDevice) or v.dim() == 0 for v in values)
    else:
        written = function._schema.is_mutable and not isinstance(args[0], OnDevice) and isinstance(args[0], Tensor)
        allowed = pointwise and all(number) and not written
    if not allowed:
        found = ", ".join(f"{tuple(t.shape)} on {t.device}" for t in tensors)
        raise DeviceMixError(f"Expected all tensors to be on the same device: {packet} got {found}, {call_site()}")


def _meant_backward(asked: Any, packet: Any, tensors: Sequence[Tensor]) -> Any:
    """Formulas of gradients ask for memory where C++ takes the forward's tensors to be: always on the CPU."""
    if packet in _MADE_LIKE and tensors:
        return DEVICE if isinstance(tensors[0], OnDevice) else asked
    if packet is aten.zeros and _is_on_device(torch._C._current_autograd_node()):
        return DEVICE
    return asked


def _is_on_device(node: Any) -> bool:
    """Whether a node of the graph computes there: it leads to a parameter, or first to a crossing."""
    while node is not None:
        if hasattr(node, "variable"):
            return isinstance(node.variable, OnDevice)
        if hasattr(node, "leads_to_device"):
            return bool(node.leads_to_device)
        node = next((following for following, _ in node.next_functions if following is not None), None)
    return False


def _refuse_generators(function: Any, kwargs: Any, goes_there: bool) -> None:
    generator = kwargs.get("generator")
    if generator is not None and (generator.device.type == "cuda") != goes_there:
        raise DeviceMixError(f"{function} got a generator on {generator.device}, {call_site()}")


def _arguments(function: Any) -> set[str]:
    return {argument.name for argument in function._schema.arguments}


def mapped(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    """``values`` with ``function`` of each tensor; torch's own trees take as long as the operation."""
    if isinstance(values, Tensor):
        return function(values)
    if isinstance(values, dict):
        return {name: mapped(function, value) for name, value in values.items()}
    return type(values)(mapped(function, value) for value in values) if type(values) in (tuple, list) else values


def tensors_in(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    inside = values.values() if isinstance(values, dict) else values if isinstance(values, tuple | list) else ()
    return [tensor for value in inside for tensor in tensors_in(value)]


def _held(tensor: Tensor) -> Tensor:
    return tensor.held if isinstance(tensor, OnDevice) else tensor


def _there(tensor: Tensor, same: dict[int, OnDevice]) -> Tensor:
    """What an operation wrote into is the very tensor that it was given."""
    if isinstance(tensor, OnDevice):
        return tensor
    return same[id(tensor)] if id(tensor) in same else OnDevice(tensor)


def call_site() -> str:
    """``models/tokens/token_policy.py:87``: the innermost line of this project."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (file := frame.f_code.co_filename).startswith(_SOURCES):
            return f"{file.removeprefix(_SOURCES)}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


@contextmanager
def _pretending() -> Iterator[None]:
    """torch says that there is a GPU, and asks no driver."""
    from torch.utils import _foreach_utils

    with ExitStack() as stack:
        for owner, name, by in _REPLACED:
            stack.enter_context(replaced(owner, name, by))
        # As on a GPU: the optimiser takes the kernels that update all parameters at once.
        kinds = [*_foreach_utils._foreach_supported_types, OnDevice]
        stack.enter_context(replaced(_foreach_utils, "_foreach_supported_types", lambda _: kinds))
        # `Module.to` would otherwise try to put the wrapper into the plain parameter.
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, False)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        # A thread of its own for the device would need its driver.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        yield


def _literal(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch makes such tensors below the level where a mode sees them."""

    def make(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        data = tree_map(lambda leaf: leaf.item() if isinstance(leaf, OnDevice) and not leaf.dim() else leaf, data)
        made = real(data, *args, **kwargs)
        return made if device is None else made.to(device)

    return make


def _pinned(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def pin(tensor: Tensor) -> Tensor:
        if isinstance(tensor, OnDevice):
            raise RuntimeError("only dense CPU tensors can be pinned")
        _PRESENT[-1].pinned += tensor.nbytes
        return tensor.clone()

    return pin


def _as_tensor(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def make(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
        made = data if isinstance(data, Tensor) else real(data)
        return made.to(made.device if device is None else device, dtype or made.dtype)

    return make


def _answer(value: Any) -> Callable[..., Any]:
    return lambda _: lambda *args, **kwargs: value


_REPLACED: tuple[tuple[Any, str, Any], ...] = (
    (torch, "tensor", _literal),
    (torch, "as_tensor", _as_tensor),
    (torch.Tensor, "to", lambda _: _to),  # Plain tensors cross too.
    (torch.Tensor, "pin_memory", _pinned),
    (torch.optim.Optimizer, "_accelerator_graph_capture_health_check", _answer(None)),
    (torch.cuda, "CUDAGraph", lambda _: _Graph),
    (torch.cuda, "graph", lambda _: _capture),
    (torch.cuda, "Stream", lambda _: _Stream),
    (torch.cuda, "current_stream", _answer(_Stream())),
    (torch.cuda, "stream", _answer(nullcontext())),
    (torch.cuda, "_lazy_init", _answer(None)),
    (torch.cuda, "is_available", _answer(True)),
    (torch.cuda, "device_count", _answer(1)),
    (torch.cuda, "synchronize", _answer(None)),
    (torch.cuda, "get_rng_state", _answer(torch.zeros(16, dtype=torch.uint8))),
    (torch.cuda, "set_rng_state", _answer(None)),
    (torch.cuda, "max_memory_allocated", _answer(0)),
    (torch.cuda, "reset_peak_memory_stats", _answer(None)),
)
