"""Runs tasks in child processes, which end with the caller: on an error, on Ctrl-C, or when the caller is killed."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Any

from visual_grpo.starter.job import Advance

if TYPE_CHECKING:
    Messages = multiprocessing.Queue[tuple[str, Any]]

Task = Callable[[Advance], None]
"""A picklable function; called in a new process with the callback for its progress."""

_SPAWN = multiprocessing.get_context("spawn")
_POLL = 0.5
"""Seconds between two checks that the processes are alive."""
_FINISHED, _FAILED = "finished", "failed"


def run_side_by_side(tasks: Mapping[str, Task], at_once: int, advance: Advance) -> None:
    """Starts the tasks in order, at most ``at_once`` at a time; their progress goes to ``advance``.

    If a task fails, terminates the others and raises RuntimeError with its traceback.
    """
    waiting = list(tasks)
    messages: Messages = _SPAWN.Queue()
    with _terminated_at_exit() as processes:
        while waiting or processes:
            while waiting and len(processes) < at_once:
                name = waiting.pop(0)
                processes[name] = _start(name, tasks[name], messages)
            _take_message(messages, processes, advance)


def _start(name: str, task: Task, messages: Messages) -> SpawnProcess:
    process = _SPAWN.Process(target=_run, args=(name, task, messages), name=name, daemon=True)
    process.start()
    return process


@contextmanager
def _terminated_at_exit() -> Iterator[dict[str, SpawnProcess]]:
    """Yields a dict of processes, which are terminated when the block ends."""
    processes: dict[str, SpawnProcess] = {}
    try:
        yield processes
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.join()


def _take_message(messages: Messages, processes: dict[str, SpawnProcess], advance: Advance) -> None:
    try:
        kind, value = messages.get(timeout=_POLL)
    except queue.Empty:
        _require_alive(processes)
        return
    if kind == _FAILED:
        raise RuntimeError(f"a process of the starter failed:\n{value}")
    if kind == _FINISHED:
        processes.pop(value).join()
    else:
        advance(kind, value)


def _require_alive(processes: Mapping[str, SpawnProcess]) -> None:
    for name, process in processes.items():
        if process.exitcode:  # with exit code 0 its last message may still be in the queue
            raise RuntimeError(
                f"the starter's process {name!r} ended with exit code {process.exitcode} and without a result;"
                " the usual cause is too little memory"
            )


def _run(name: str, task: Task, messages: Messages) -> None:
    """The main function of a child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C and terminates this process
    caller = multiprocessing.parent_process()

    def advance(module: str, done: int) -> None:
        if caller is not None and not caller.is_alive():
            os._exit(1)
        messages.put((module, done))

    try:
        task(advance)
    except Exception:
        messages.put((_FAILED, traceback.format_exc()))
    else:
        messages.put((_FINISHED, name))
