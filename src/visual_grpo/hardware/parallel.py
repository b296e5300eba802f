"""Independent batches computed on every CPU core at the same time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

A = TypeVar("A")
B = TypeVar("B")


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
    """Gradient recording is set per thread: a new thread records it, whatever its creator had set."""
    return function(item)


def _cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
