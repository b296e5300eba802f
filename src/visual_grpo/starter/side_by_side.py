"""Runs the halves of the pretraining in processes of their own, with one torch thread each.

One thread each makes the weights independent of the number of cores. The processes end with the caller:
on an error, on Ctrl-C, and also when the caller is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import SpawnProcess
from typing import Any

from visual_grpo.starter.parts import HALVES, Job

_SPAWN = multiprocessing.get_context("spawn")
_POLL = 0.5
"""Seconds between two looks at whether a process still lives."""
_REPORT_EVERY = 5
"""Steps between two messages."""

Message = tuple[str, Any]
"""(module, steps done), or ("finished", half), or ("failed", traceback)."""


def run_halves(job: Job, at_once: int, advance: Callable[[str, int], None]) -> None:
    """Runs every half, ``at_once`` of them side by side.

    Raises RuntimeError with the traceback of a half that failed.
    """
    waiting = list(HALVES)
    messages = _SPAWN.Queue()
    with _running() as processes:
        while waiting or processes:
            while waiting and len(processes) < at_once:
                name = waiting.pop(0)
                processes[name] = _start(name, job, messages)
            _handle(messages, processes, advance)


def _start(name: str, job: Job, messages: multiprocessing.Queue[Message]) -> SpawnProcess:
    process = _SPAWN.Process(target=_run_half, args=(name, job, messages), name=f"starter-{name}", daemon=True)
    process.start()
    return process


@contextmanager
def _running() -> Iterator[dict[str, SpawnProcess]]:
    """Processes by half; whichever still run when the block ends are ended too."""
    processes: dict[str, SpawnProcess] = {}
    try:
        yield processes
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.join()


def _handle(
    messages: multiprocessing.Queue[Message],
    processes: dict[str, SpawnProcess],
    advance: Callable[[str, int], None],
) -> None:
    """Takes one message, or finds out that none will come."""
    try:
        kind, value = messages.get(timeout=_POLL)
    except queue.Empty:
        for name, process in processes.items():
            if not process.is_alive():
                raise RuntimeError(
                    f"pretraining of the starter's {name} half ended without a result (exit code"
                    f" {process.exitcode}); too little memory is the usual cause"
                ) from None
        return
    if kind == "failed":
        raise RuntimeError(f"pretraining of the starter failed:\n{value}")
    if kind == "finished":
        processes.pop(value).join()
    else:
        advance(kind, value)


def _run_half(name: str, job: Job, messages: multiprocessing.Queue[Message]) -> None:
    """What a process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the caller, who ends this process
    import torch

    torch.set_num_threads(1)
    caller = multiprocessing.parent_process()

    def advance(module: str, done: int) -> None:
        if caller is not None and not caller.is_alive():
            os._exit(1)
        if done % _REPORT_EVERY == 0:
            messages.put((module, done))

    try:
        HALVES[name](job, advance)
    except Exception:
        messages.put(("failed", traceback.format_exc()))
    else:
        messages.put(("finished", name))
