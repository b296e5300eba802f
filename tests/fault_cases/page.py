"""docs/faults.md: what is said about the table, and the table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.fault_cases.fault import Row

PAGE = Path(__file__).parents[2] / "docs/faults.md"
HEAD = """# Faults

What happens when something breaks. Each row is a fault that a test plants in a small finished project, and the command
that meets it. Nothing that was complete may be lost, and no row may show a traceback. `python -m tests.fault_cases`
writes this page; the slow test `tests/test_faults_page.py` fails when a row is not true any more.

- *Command* is what follows `.venv/bin/kedro run`.
- *Exit* is the exit code: 0 where the run went on, 1 after an error, 128 plus the signal's number after a signal.
- *It says* is the first sentence of the message; what to do follows in the message itself.
- *Kept* is what the files and MLflow's database show afterwards:
    - "everything, unchanged": no byte of the base model, the records, the baseline, the adapters, the checkpoints and
      the evaluation has changed, and no row of MLflow is gone;
    - "all that a run without the fault leaves": adapters and metrics are those of a training without the fault, bit for
      bit, and MLflow has each row of them once;
    - "then": the command that was given next, once the fault was removed, and what it left.
"""
TABLE = "| fault | command | exit | it says | kept |\n|---|---|---|---|---|\n"


def page(themes: Mapping[str, Iterable[Row]]) -> str:
    parts = [f"\n## {theme}\n\n{TABLE}" + "".join(f"{row}\n" for row in rows) for theme, rows in themes.items()]
    return HEAD + "".join(parts)


def rows_of_page() -> dict[str, str]:
    """The first cell of each row -> the row as it stands."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = {re.split(r"(?<!\\)\|", line)[1].strip(): line for line in lines if line.startswith("| ")}
    return {what: line for what, line in cells.items() if what != "fault"}
