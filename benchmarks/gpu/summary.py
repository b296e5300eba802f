"""The rows that were recorded, as tables: one for each name, what failed last."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

Row = Mapping[str, Any]
UNSHOWN = ("part", "job", "table")
JSON_ONLY = ("checks", "metrics")
"""Tables that are left to results.json."""
LAST = ("findings", "errors")
WIDTH, LONGEST = 130, 240


def tables(rows: Sequence[Row], ended: Sequence[Row]) -> str:
    """All tables as text, in the order of their first rows; at the end what failed and how each process ended."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["table"], []).append(row)
    names = [name for name in found if name not in (*JSON_ONLY, *LAST)] + [name for name in LAST if name in found]
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None)
    for name in names:
        _print(console, name, found[name])
    _print(console, "processes", [{"of": f"{row['part']}: {row['job']}", **row} for row in ended])
    errors, cut = len(found.get("errors", ())), sum(row["end"] != 0 for row in ended)
    console.print(f"{errors} errors; {cut} of {len(ended)} processes did not come to their end")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def _print(console: Console, name: str, rows: Sequence[Row]) -> None:
    columns = list(dict.fromkeys(column for row in rows for column in row if column not in UNSHOWN))
    table = Table(box=None, pad_edge=False)
    for column in columns:
        numbers = any(isinstance(row.get(column), float) for row in rows)
        table.add_column(column.replace("_", " "), justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(row.get(column))) for column in columns))
    console.print(f"\n== {name}", markup=False)
    console.print(table)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    text = "" if value is None else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
