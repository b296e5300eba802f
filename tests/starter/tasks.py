"""Tasks for `run_side_by_side`, which another process can import; and the starter's tasks in this process."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from visual_grpo.starter.base import Advance, ChildTask


def in_this_process(tasks: Sequence[ChildTask], at_once: int, advance: Advance) -> None:
    """In the place of `run_side_by_side`: a new process imports libraries for seconds."""
    for task in tasks:
        task(advance)


def count(name: str, steps: int, advance: Advance) -> None:
    for step in range(steps):
        advance(name, step + 1)


def tell_pid_and_go_on(file: Path, advance: Advance) -> None:
    file.write_text(str(os.getpid()))
    for step in range(10**6):
        advance("endless", step)
        time.sleep(0.02)


def fail_once_there(file: Path, advance: Advance) -> None:
    while not file.is_file() or not file.read_text():
        time.sleep(0.02)
    raise ValueError("the ink has run out")


def die(advance: Advance) -> None:
    os._exit(9)
