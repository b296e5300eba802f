"""Terminal output: a progress bar, headings, tables.

On a terminal the bar is redrawn in place. Elsewhere (a log file, CI) plain lines are printed at intervals, so
that a log stays readable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from visual_grpo.common.errors import sanitize

T = TypeVar("T")
Value = float | int | str

_PLAIN_WIDTH = 120
_LONGEST_NAME = 24
"""Characters of a table's first column that are kept together."""
_SPEED_WINDOW = 180.0
"""Seconds over which the speed is averaged, because evaluations and checkpoints interrupt the steps."""


class Bar:
    def __init__(self, display: Progress, description: str, total: int, completed: int, every: float) -> None:
        self._display, self._every = display, every
        task = display.add_task(description, total=total, completed=completed, shown="")
        self._task = display.tasks[task]
        self._fields: dict[str, Value] = {}
        self._shown = ""
        self._printed_at, self._printed = display.get_time(), (-1.0, "")

    def below(self, description: str, total: int) -> Bar:
        """Shows a second bar below, such as of a part of the first step."""
        return Bar(self._display, description, total, 0, self._every)

    def expect(self, total: int) -> None:
        self._display.update(self._task.id, total=total)

    def advance(self, n: int = 1, **fields: Value | None) -> None:
        """Counts ``n`` more steps as done; ``fields`` are shown next to the bar until they are replaced, or None."""
        self._fields = {name: value for name, value in (self._fields | fields).items() if value is not None}
        self._shown = " ".join(f"{name}={format_value(value)}" for name, value in self._fields.items())
        self._display.update(self._task.id, advance=n, shown=escape(sanitize(self._shown)))
        if self._display.get_time() - self._printed_at >= self._every:
            self.print()

    def track(self, items: Iterable[T]) -> Iterator[T]:
        """Yields the items, each a step that is done when the next is asked for."""
        for item in items:
            yield item
            self.advance()

    def complete(self) -> None:
        """Counts all steps as done, where their number was only an estimate."""
        self._display.update(self._task.id, completed=self._task.total)

    def note(self, text: str) -> None:
        """Prints a line above the bar."""
        _print_line(self._display.console, text)

    def print(self) -> None:
        """Prints the state as a line, unless a terminal shows it or it was printed already."""
        task = self._task
        if self._display.live.is_started or self._printed == (task.completed, self._shown):
            return
        self._printed_at, self._printed = self._display.get_time(), (task.completed, self._shown)
        left = None if task.finished else task.time_remaining
        seconds, word = (task.elapsed or 0.0, "elapsed") if left is None else (left, "left")
        count, spent = f"{task.completed:.0f}/{task.total:.0f}", timedelta(seconds=round(seconds))
        self.note("  ".join(filter(None, [f"{task.description} {count}", self._shown, f"{spent} {word}"])))


_shown: list[Bar] = []
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
    display = _display(console or _console(), clock)
    bar = Bar(display, description, total, completed, every)
    if not display.console.is_terminal:
        try:
            yield bar
        finally:
            bar.print()
        return
    with display:
        _shown.append(bar)
        try:
            yield bar
        finally:
            _shown.remove(bar)


def heading(text: str) -> None:
    console = _console()
    shown = _text(text)
    console.print(Rule(shown, align="left") if console.is_terminal else Text("== ").append_text(shown))


def note(text: str, style: str = "") -> None:
    """Prints one line verbatim: without rich markup, control characters escaped.

    ``style`` is rich's, such as ``bold green``; only a terminal shows it.
    """
    if _shown:
        _shown[-1].note(text)
    else:
        _print_line(_console(), text, style)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Value | None]]) -> None:
    """Prints rows under named columns; numbers are right-aligned, None is an empty cell.

    Raises ValueError: a row does not have one cell per column.
    """
    grid = Table(title=_text(title), title_justify="left", title_style="bold")
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"table {title!r}: {len(columns)} columns, but a row of {len(row)}: {row!r}")
    for index, column in enumerate(columns):
        cells = [row[index] for row in rows]
        numeric = all(isinstance(cell, int | float | None) for cell in cells)
        # The names, of usual length, are never broken: the headings next to them can be. A least width instead would
        # not make the other columns narrower, and cut the table.
        longest = max((len(format_value(cell)) for cell in cells), default=0)
        whole = index == 0 and longest <= min(_LONGEST_NAME, _console().width // 2)
        grid.add_column(column, justify="right" if numeric else "left", overflow="fold", no_wrap=whole)
    for row in rows:
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


def _console() -> Console:
    """A console on the current stdout; wide if it is not a terminal, so that lines do not wrap at 80."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _PLAIN_WIDTH)
    return console


def _display(console: Console, clock: Callable[[], float]) -> Progress:
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
        get_time=clock,
        speed_estimate_period=_SPEED_WINDOW,
    )


def _print_line(console: Console, text: str, style: str = "") -> None:
    console.print(_text(text), style=style, highlight=False, soft_wrap=True)


def _text(text: str) -> Text:
    """Returns the text without markup and control characters."""
    return Text(sanitize(text))
