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


def map_on_cores(
    function: Callable[[A], B], items: Iterable[A], device: torch.device, *, gradient: bool = False
) -> list[B]:
    """Applies ``function`` to each item, with ``gradient`` or without; results are in the order of the items.

    On a CPU, items run in (cores / torch threads) parallel workers; unlike more torch threads, this does not change
    rounding. On a GPU, and with sharded networks, items run one after the other.
    """
    items = list(items)
    # Sharded layers are gathered in an order that all processes share: not by several threads at a time.
    alone = device.type != "cpu" or shards.active()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = 1 if alone else min(len(items), max(1, cores // _processes) // torch.get_num_threads())

    def run(item: A) -> B:
        with torch.set_grad_enabled(gradient):  # Each thread has its own setting.
            return function(item)

    if workers < 2:
        return [run(item) for item in items]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(run, items))


def share_cores(processes: int) -> None:
    """Leaves this process its part of the cores, beside so many others that do the same."""
    global _processes
    _processes = processes
