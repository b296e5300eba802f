"""The torch device, the processor, the library that quantizes on it, the CPU cores, and work in a thread."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from visual_grpo.common import phases
from visual_grpo.common.errors import Remedy, UserError, counted

_BITSANDBYTES = Remedy(make="quantised")


def device_kind(name: str) -> str:
    """Returns ``cpu`` or ``cuda``, as ``name`` asks, whether or not it is there."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name.partition(":")[0]


def resolve_device(name: str, setting: str = "model.device") -> torch.device:
    """``auto`` is cuda if available, else cpu; error messages call the parameter ``setting``."""
    if re.fullmatch(r"auto|cpu|meta|cuda(:\d+)?", name) is None:  # meta is a plan's.
        raise UserError(f"{setting} is {name!r}; expected auto, cpu, cuda or cuda:N.")
    device = torch.device(device_kind(name) if name == "auto" else name)
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        found = counted(count, "CUDA device") if count else "no CUDA device"
        without = (
            "" if torch.version.cuda or torch.version.hip else " (built without CUDA: install a CUDA build of torch)"
        )
        raise UserError(f"{setting} is {name!r}, but torch finds {found}{without}; use auto or cpu.")
    return device


def processor() -> str:
    """Returns the kind of processor, which the last bits of a result depend on: ``x86_64 AVX512``."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def require_fast(dtype: str, device: torch.device) -> None:
    """Raises UserError for a GPU that has no arithmetic in ``dtype``, which torch would emulate many times slower."""
    if device.type == "cuda" and dtype == "bfloat16":
        with torch.cuda.device(device):
            if torch.cuda.is_bf16_supported(including_emulation=False):
                return
        raise UserError(
            f"model.dtype is bfloat16, which {torch.cuda.get_device_name(device)} does not compute in; use float16"
            " where the model's values stay below 65504, or float32."
        )


def require_bitsandbytes(setting: str, value: str) -> None:
    """Raises UserError where the library is not installed, without importing it.

    It is not a dependency: peft imports it wherever it is installed, which makes every command start seconds later.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            f"{setting} is {value}, which needs the library bitsandbytes; it is not installed. Install it"
            f" (quantised.lock), or leave {setting} out.",
            remedy=_BITSANDBYTES,
        )


def bitsandbytes(setting: str, value: str, device: torch.device) -> Any:
    """Returns the library. Raises UserError where it is missing, or does not work on ``device``."""
    require_bitsandbytes(setting, value)
    try:
        import bitsandbytes as library

        if device.type != "meta":
            numbers = torch.linspace(-1, 1, 64, device=device)
            torch.ops.bitsandbytes.quantize_4bit(numbers, 64, "nf4", torch.uint8)
    except (ImportError, RuntimeError, OSError) as error:
        raise UserError(
            f"{setting} is {value}, but bitsandbytes does not work on {device}: {error}\nInstall it again"
            f" (quantised.lock), look at `python -m bitsandbytes`, or leave {setting} out.",
            remedy=_BITSANDBYTES,
        ) from error
    return library


A = TypeVar("A")
B = TypeVar("B")
T = TypeVar("T")
_processes = 1
_sharded = False


def map_on_cores(
    function: Callable[[A], B], items: Iterable[A], device: torch.device, *, gradient: bool = False
) -> list[B]:
    """Applies ``function`` to each item, with ``gradient`` or without; results are in the order of the items.

    On a CPU, items run in (cores / torch threads) parallel workers; unlike more torch threads, this does not change
    rounding. On a GPU, and with sharded networks, items run one after the other.
    """
    items = list(items)
    # Sharded layers are gathered in an order that all processes share: not by several threads at a time.
    alone = device.type != "cpu" or _sharded
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = 1 if alone else min(len(items), max(1, cores // _processes) // torch.get_num_threads())

    def run(item: A) -> B:
        with torch.set_grad_enabled(gradient):  # Each thread has its own setting.
            return function(item)

    if workers < 2:
        return phases.map_alike(run, items)
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(run, items))


def share_cores(processes: int, *, sharded: bool = False) -> None:
    """Limits this process to its share of the cores among ``processes``."""
    global _processes, _sharded
    _processes, _sharded = processes, sharded


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Starts ``work`` in a daemon thread; the future holds its result or error.

    The interpreter joins a pool's threads when it ends: an interrupted run would wait for a server's answer.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # Raised again by the future.
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
