"""Computes independent batches in parallel on all CPU cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from visual_grpo.hardware import shards

A = TypeVar("A")
B = TypeVar("B")
_processes = 1


def map_on_cores(function: Callable[[A], B], items: Iterable[A], device: torch.device) -> list[B]:
    """Applies ``function`` to each item without gradient; results are in the order of the items.

    On a CPU, items run in (cores / torch threads) parallel workers; unlike more torch threads, this does not change
    rounding. On a GPU, and of networks that are cut (`shards`), items run one after the other.
    """
    items = list(items)
    threads = torch.get_num_threads()
    # Layers are gathered in an order that all processes share: not by several threads at a time.
    alone = device.type != "cpu" or shards.active()
    workers = 1 if alone else min(len(items), _cores() // threads)
    if workers < 2:
        return [_without_gradient(function, item) for item in items]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda item: _without_gradient(function, item), items))


@torch.no_grad()
def _without_gradient(function: Callable[[A], B], item: A) -> B:
    """Disables gradients inside the worker: the setting is per thread and is not inherited from the creator."""
    return function(item)


def share_cores(processes: int) -> None:
    """From now on this process takes its part of the cores, beside so many others that do the same."""
    global _processes
    _processes = processes


def _cores() -> int:
    """Number of CPU cores available to this process."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, there // _processes)
