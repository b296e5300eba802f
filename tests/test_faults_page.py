"""docs/faults.md: every fault is planted again and must end as the page says.

``python -m tests.fault_cases`` writes the page.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault_cases import THEMES
from tests.fault_cases.fault import Row
from tests.fault_cases.observe import EVERYTHING, LOST, TRACEBACK, kept
from tests.fault_cases.page import rows_of_page
from tests.fault_cases.world import State

ROOT = Path(__file__).parents[1]
FAULTS = {fault.what: fault for faults in THEMES.values() for fault in faults}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    """All faults, planted now; in a separate process, which forks."""
    file = tmp_path_factory.mktemp("faults") / "rows.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.fault_cases", f"--rows={file}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {values["what"]: Row(**values) for values in json.loads(file.read_text(encoding="utf-8"))}


@pytest.mark.slow
@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_ends_as_the_page_says(what: str, rows: dict[str, Row]) -> None:
    if what not in rows and FAULTS[what].needs_disk:
        pytest.skip("this system lets no process mount a disk")
    assert str(rows[what]) == rows_of_page()[what]


def test_whatever_is_missing_after_an_error_is_called_lost() -> None:
    before = State({"adapters": "a", "baseline": "b"}, frozenset({"1", "2"}), {"run": [("kl", 1, 0.5)]}, False, "")
    assert kept(before, before, 1, before) == EVERYTHING
    for changes, what in (
        ({"files": {"adapters": "a", "baseline": ""}}, "baseline"),
        ({"checkpoints": frozenset({"2", "3"})}, "checkpoints"),
        ({"curves": {"run": []}}, "MLflow's rows"),
    ):
        assert kept(before, replace(before, **changes), 1, before) == f"{LOST}: {what}"
    assert kept(before, replace(before, curves={}), 0, before).startswith(LOST), "after a run that went on too"


def test_the_page_has_every_fault_and_at_least_fifty() -> None:
    assert sum(len(faults) for faults in THEMES.values()) == len(FAULTS) >= 50, "each has a distinct description"
    assert list(rows_of_page()) == list(FAULTS)


def test_nothing_on_the_page_is_lost() -> None:
    for line in rows_of_page().values():
        assert LOST not in line
        assert TRACEBACK not in line
