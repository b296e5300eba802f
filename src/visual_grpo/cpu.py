"""How this process computes on a CPU: threads, cores, and what becomes of the memory of freed tensors."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

A = TypeVar("A")
B = TypeVar("B")

# mallopt(3)'s numbers of what can be set, and its environment variables.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_SET_BY_THE_USER = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"}
_KEPT = 512 * 2**20
_FROM_THE_HEAP = 32 * 2**20
"""Bytes; glibc takes no more."""


def use_threads(count: int) -> None:
    """For the rest of this process. Another number of threads rounds differently."""
    torch.set_num_threads(count)
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Has glibc keep up to half a GiB of freed memory for the next tensors; other C libraries stay as they are.

    By itself glibc gives the activations of a forward back to the kernel, more or less of them from one process to the
    next, and their pages have to be cleared again: 5 to 15 % of a rollout's CPU time (benchmarks/cores.py). What is
    computed does not change. The environment (``MALLOC_*``, ``GLIBC_TUNABLES``) still wins.
    """
    if platform.libc_ver()[0] != "glibc" or _SET_BY_THE_USER & os.environ.keys():
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_TRIM_THRESHOLD, _KEPT)
    libc.mallopt(_MMAP_THRESHOLD, _FROM_THE_HEAP)


def map_on_cores(function: Callable[[A], B], items: Iterable[A], device: torch.device) -> list[B]:
    """``function`` of each item, without gradient, in the order of the items.

    On a CPU as many at a time as there are cores for: unlike torch's own threads, that changes no rounding. On a GPU
    one after the other.
    """
    items = list(items)
    threads = torch.get_num_threads()
    at_a_time = min(len(items), _cores() // threads) if device.type == "cpu" else 1
    if at_a_time < 2:
        return [_without_gradient(function, item) for item in items]
    with ThreadPoolExecutor(at_a_time) as pool:
        return list(pool.map(lambda item: _without_gradient(function, item), items))


@torch.no_grad()
def _without_gradient(function: Callable[[A], B], item: A) -> B:
    """A new thread would record a gradient, whatever its starter does."""
    return function(item)


def _cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
