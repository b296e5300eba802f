"""Terminal output: a progress bar, headings, tables.

On a terminal the bar is redrawn in place. Elsewhere (a log file, CI) plain lines are printed at intervals, so
that a log stays readable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from visual_grpo.errors import visible

Value = float | int | str

_PLAIN_WIDTH = 120
_LONGEST_NAME = 24
"""Characters of a table's first column that are kept together."""
_SPEED_WINDOW = 180.0
"""Seconds over which the speed is averaged, because evaluations and checkpoints interrupt the steps."""


class Bar(Protocol):
    """A running progress display."""

    def advance(self, n: int = 1, **fields: Value) -> None:
        """Counts ``n`` more steps as done; ``fields`` are shown beside the bar until they are replaced."""
        ...

    def complete(self) -> None:
        """Counts all steps as done, where their number was only an estimate."""
        ...

    def note(self, text: str) -> None:
        """Prints a line above the bar."""
        ...


_shown: list[_RichBar] = []
"""Bars on a terminal: a line that is printed past them would be glued to the last one."""


@contextmanager
def progress(
    description: str,
    total: int,
    *,
    completed: int = 0,
    every: float = 15.0,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Bar]:
    """Shows the progress of a loop of ``total`` steps and the time left.

    Args:
        completed: steps that an earlier run has done (when resuming).
        every: minimum seconds between two lines if stdout is not a terminal.
    """
    console = console or _console()
    if console.is_terminal:
        with _rich_progress(console) as display:
            shown = _RichBar(display, display.add_task(description, total=total, completed=completed, shown=""))
            _shown.append(shown)
            try:
                yield shown
            finally:
                _shown.remove(shown)
    else:
        bar = _PlainBar(console, description, total, completed, every, clock)
        try:
            yield bar
        finally:
            bar.close()


def heading(text: str) -> None:
    """Prints a section heading."""
    console = _console()
    shown = _text(text)
    console.print(Rule(shown, align="left") if console.is_terminal else Text("== ").append_text(shown))


def note(text: str) -> None:
    """Prints one line as it is: square brackets are no rich markup, control characters are made visible."""
    if _shown:
        _shown[-1].note(text)
    else:
        _print_line(_console(), text)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Value | None]]) -> None:
    """Prints rows under named columns; numbers are right-aligned, None is an empty cell.

    Raises:
        ValueError: a row does not have one cell per column.
    """
    grid = Table(title=_text(title), title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        numeric = all(isinstance(row[index], int | float) or row[index] is None for row in rows if index < len(row))
        # The names, of usual length, are never broken: the headings beside them can be.
        least = min(_LONGEST_NAME, max((len(format_value(row[0])) for row in rows), default=0)) if index == 0 else None
        grid.add_column(column, justify="right" if numeric else "left", overflow="fold", min_width=least)
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"table {title!r}: {len(columns)} columns, but a row of {len(row)}: {row!r}")
        grid.add_row(*(_text(format_value(cell)) for cell in row))
    _console().print(grid)


def summary(title: str, mapping: Mapping[str, Value | None]) -> None:
    """Prints names with their values under a title."""
    grid = Table(title=_text(title), title_justify="left", title_style="bold", show_header=False, box=None)
    grid.add_column()
    grid.add_column(overflow="fold")
    for name, value in mapping.items():
        grid.add_row(_text(name), _text(format_value(value)))
    _console().print(grid)


def format_value(value: Value | None) -> str:
    """Formats floats with three significant digits, other values with ``str``."""
    if value is None:
        return ""
    return f"{value:z.3g}" if isinstance(value, float) else str(value)


class _RichBar:
    def __init__(self, display: Progress, task: object) -> None:
        self._display = display
        self._task = task
        self._fields: dict[str, Value] = {}

    def advance(self, n: int = 1, **fields: Value) -> None:
        self._fields |= fields
        self._display.update(self._task, advance=n, shown=escape(visible(_join(self._fields))))  # type: ignore[arg-type]

    def complete(self) -> None:
        [total] = (task.total for task in self._display.tasks if task.id == self._task)
        self._display.update(self._task, completed=total)  # type: ignore[arg-type]

    def note(self, text: str) -> None:
        _print_line(self._display.console, text)


class _PlainBar:
    def __init__(
        self,
        console: Console,
        description: str,
        total: int,
        completed: int,
        every: float,
        clock: Callable[[], float],
    ) -> None:
        self._console = console
        self._description = description
        self._total = total
        self._done = completed
        self._every = every
        self._clock = clock
        self._began = self._printed_at = clock()
        self._first: tuple[float, int] | None = None
        self._printed_done = -1
        self._fields: dict[str, Value] = {}

    def advance(self, n: int = 1, **fields: Value) -> None:
        self._done += n
        self._fields |= fields
        # The time before the first step (loading, checks), or before repeated steps, must not count towards the speed.
        if self._first is None or n < 0:
            self._first = self._clock(), self._done
        if self._clock() - self._printed_at >= self._every:
            self._print()

    def complete(self) -> None:
        self._done = self._total

    def note(self, text: str) -> None:
        _print_line(self._console, text)

    def close(self) -> None:
        if self._printed_done != self._done:
            self._print()

    def _print(self) -> None:
        self._printed_at, self._printed_done = self._clock(), self._done
        parts = [f"{self._description} {self._done}/{self._total}", _join(self._fields), self._time()]
        self.note("  ".join(part for part in parts if part))

    def _time(self) -> str:
        left = self._total - self._done
        began, start = self._first or (self._began, self._done)
        steps = self._done - start
        # An estimate from the first steps would be far off.
        if left <= 0 or steps < self._total / 50:
            return f"{_duration(self._clock() - self._began)} elapsed"
        return f"{_duration((self._clock() - began) / steps * left)} left"


def _console() -> Console:
    """A console on the current stdout; wide if it is not a terminal, so that lines do not wrap at 80."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _PLAIN_WIDTH)
    return console


def _rich_progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeElapsedColumn(),
        TextColumn("elapsed"),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
        console=console,
        speed_estimate_period=_SPEED_WINDOW,
    )


def _join(fields: Mapping[str, Value]) -> str:
    return " ".join(f"{name}={format_value(value)}" for name, value in fields.items())


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _print_line(console: Console, text: str) -> None:
    console.print(_text(text), highlight=False, soft_wrap=True)


def _text(text: str) -> Text:
    """As it is: no markup, and nothing that a terminal would obey."""
    return Text(visible(text))
