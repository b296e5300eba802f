"""What a planted fault is, and what the page says of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

Edit = Callable[[Path], object]
"""Changes something in the project's folder."""
Moment = tuple[Callable[[Path, str], bool], Callable[[Path, int], None]]
"""Whether it is time, by the project and what was printed so far; and what happens then to it or the process's id."""

TRAIN = "--pipeline=train --params=grpo.steps=3"
ERROR = "Error: "
RESUME = "--pipeline=train --params=resume=auto,grpo.steps=3"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One row of the page."""

    what: str
    """In plain words: what is broken, or done wrong."""
    run: str
    """What follows ``kedro run``."""
    says: str = ERROR
    """Where the sentence begins that the page shows."""
    edit: Edit | None = None
    """Breaks something before the command."""
    beside: Callable[[Path], AbstractContextManager[object]] | None = None
    """Is so while the command runs."""
    inside: Callable[[], None] | None = None
    """Breaks something in the command's own process, before it begins."""
    moment: Moment | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    needs_disk: bool = False
    """Whether it is planted on a small disk, which not every system lets a process mount."""
    repair: Edit | None = None
    """Removes what the fault has broken, before ``then``."""
    then: str | None = None
    """The command that goes on. After it everything is as if there had been no fault."""


@dataclass(frozen=True)
class Row:
    """How a fault ended, in the words of the page."""

    what: str
    command: str
    code: str
    says: str
    kept: str

    def __str__(self) -> str:
        return f"| {self.what} | {self.command} | {self.code} | {self.says} | {self.kept} |"


def once(text: str) -> Callable[[Path, str], bool]:
    """When the command has printed the text."""
    return lambda project, printed: text in printed


def gets(number: signal.Signals) -> Callable[[Path, int], None]:
    """The process gets a signal."""
    return lambda project, pid: os.kill(pid, number)
