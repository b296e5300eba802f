"""Batches on all CPU cores, and work in a thread of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

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
        return [run(item) for item in items]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(run, items))


def share_cores(processes: int, *, sharded: bool = False) -> None:
    """Leaves this process its part of the cores, beside so many others that do the same."""
    global _processes, _sharded
    _processes, _sharded = processes, sharded


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Starts ``work``; its result or error is the future's.

    The threads of a pool would be joined when the interpreter ends: a run that was interrupted, or that another error
    ended, would wait for the answers of a server.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # Raised again by the future.
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
