"""The pages of rewards list what is built in, its seconds and its licences."""

from __future__ import annotations

import re
import runpy
import sys
from typing import Any

import pytest

from tests.markdown import ROOT
from visual_grpo.rewards.catalogue import BUILT_IN


@pytest.fixture(scope="module")
def speed() -> dict[str, Any]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return runpy.run_path(str(ROOT / "benchmarks" / "reward_speed.py"))
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def rows_after(page: str, head: str) -> dict[str, list[str]]:
    """The rows of the table whose head begins with ``head``: the name in the first cell -> the other cells."""
    table = (ROOT / "docs" / page).read_text(encoding="utf-8").split(f"\n| {head} |", 1)[1].split("\n\n", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {row[0].strip("`"): row[1:] for row in rows}


def test_every_built_in_reward_is_explained_and_timed(speed: dict[str, Any]) -> None:
    assert set(rows_after("rewards.md", "reward")) == set(BUILT_IN)
    seconds = rows_after("experiments/speed.md", "reward")
    assert set(seconds) == set(BUILT_IN) - {*speed["ELSEWHERE"]}
    assert all(float(cell) >= 0 for cells in seconds.values() for cell in cells)


def test_everything_that_is_loaded_has_its_licence() -> None:
    licences = runpy.run_path(str(ROOT / "benchmarks" / "reward_licences.py"))
    listed = {name for row in licences["LICENCES"] for name in re.findall("`([a-z0-9_]+)`", row[1])}
    page = (ROOT / "docs" / "reward_workers.md").read_text(encoding="utf-8")
    shipped = {name for name in re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) if (ROOT / "workers" / name).is_dir()}
    loading = {name for name, (_, _, needs) in rows_after("rewards.md", "reward").items() if "weights" in needs}
    assert listed == loading | (shipped - {"template"}) | {"lpips", "ocr"}


def test_a_time_is_measured(speed: dict[str, Any], tmp_path: Any) -> None:
    small, large = speed["timed"]("edge_density", tmp_path)
    assert 0 < small < large
