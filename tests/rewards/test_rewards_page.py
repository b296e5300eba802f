"""The page of rewards lists what is built in, as the command that makes its table says."""

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


def test_the_table_is_that_of_the_command_for_every_built_in_reward(speed: dict[str, Any]) -> None:
    lines = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    listed = {row[0].strip("`"): row[1:4] for row in rows if len(row) == 6}
    assert listed == {name: [cell.strip() for cell in facts] for name, facts in speed["FACTS"].items()}
    assert set(listed) == set(BUILT_IN), "add the reward to FACTS in benchmarks/reward_speed.py and its row to the page"
    for row in rows:
        timed = row[0].strip("`") not in speed["ELSEWHERE"]
        assert len(row) != 6 or all(float(cell) >= 0 for cell in row[4:] if timed)


def test_everything_that_is_loaded_has_its_licence(speed: dict[str, Any]) -> None:
    licences = runpy.run_path(str(ROOT / "benchmarks" / "reward_licences.py"))
    listed = {name for row in licences["LICENCES"] for name in re.findall("`([a-z0-9_]+)`", row[1])}
    page = (ROOT / "docs" / "reward_workers.md").read_text(encoding="utf-8")
    shipped = {name for name in re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) if (ROOT / "workers" / name).is_dir()}
    loading = {name for name, facts in speed["FACTS"].items() if "weights" in facts[2]}
    assert listed == loading | (shipped - {"template"}) | {"lpips", "ocr"}


def test_a_time_is_measured(speed: dict[str, Any], tmp_path: Any) -> None:
    small, large = speed["timed"]("edge_density", tmp_path)
    assert 0 < small < large
