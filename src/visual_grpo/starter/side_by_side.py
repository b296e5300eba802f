"""Runs tasks in child processes, which end with the caller: on an error, on Ctrl-C, or when the caller is killed."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch.multiprocessing.spawn import ProcessExitedException, start_processes

from visual_grpo.starter.job import Advance

if TYPE_CHECKING:
    Messages = multiprocessing.Queue[tuple[str, int]]

Task = Callable[[Advance], None]
"""A picklable function; called in a new process with the callback for its progress."""
_POLL = 0.2
"""Seconds between two looks at the processes."""


def run_side_by_side(tasks: Sequence[Task], at_once: int, advance: Advance) -> None:
    """Runs the tasks, ``at_once`` of them at a time; their progress goes to ``advance``.

    If a task fails, terminates the others and raises its error with its traceback, or RuntimeError if it was killed.
    """
    for first in range(0, len(tasks), at_once):
        _run_together(tasks[first : first + at_once], advance)


def _run_together(tasks: Sequence[Task], advance: Advance) -> None:
    messages: Messages = multiprocessing.get_context("spawn").Queue()
    running = start_processes(_run, (tasks, messages), nprocs=len(tasks), join=False, daemon=True, start_method="spawn")
    try:
        finished = False
        while not finished:
            finished = running.join(_POLL)
            while not messages.empty():
                advance(*messages.get())
    except ProcessExitedException as error:
        raise RuntimeError(
            f"a process of the starter ended without a result ({error}); the usual cause is too little memory"
        ) from error
    finally:
        for process in running.processes:
            process.terminate()
            process.join()


def _run(number: int, tasks: Sequence[Task], messages: Messages) -> None:
    """The main function of a child process."""
    caller = multiprocessing.parent_process()

    def advance(module: str, done: int) -> None:
        if caller is not None and not caller.is_alive():
            os._exit(1)
        messages.put((module, done))

    tasks[number](advance)
