"""Tasks for `run_side_by_side`, which another process can import; and the starter's tasks in this process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file

from visual_grpo.starter.pretraining import Advance, ChildTask


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


def die(number: int, advance: Advance) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60)


class Counter:
    """A progress bar that counts."""

    def __init__(self) -> None:
        self.done = 0
        self.notes: list[str] = []

    def advance(self, n: int = 1, **fields: object) -> None:
        self.done += n

    def note(self, text: str) -> None:
        self.notes.append(text)


@contextmanager
def silent_progress(description: str, total: int, expected: Sequence[str] = ()) -> Iterator[Counter]:
    counter = Counter()
    yield counter
    assert (counter.done, counter.notes) == (total, [*expected])


def weights_are_equal(folder: Path, other: Path) -> list[bool]:
    """For each file of weights in ``folder``, whether that in ``other`` has the same bits."""
    files = sorted(folder.rglob("*.safetensors"))
    pairs = [(load_file(file), load_file(other / file.relative_to(folder))) for file in files]
    return [all(torch.equal(one[name], two[name]) for name in one) for one, two in pairs]
