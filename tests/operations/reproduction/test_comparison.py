"""What two trainings have in common, row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.evaluation.defaults import parameters
from visual_grpo.adapter_folder import weight_sums
from visual_grpo.operations.reproduction.repeat import adapter_rows, identity_rows, metric_row, tolerance_rows


def facts(**changes: Any) -> dict[str, Any]:
    tree = parameters().model_dump(mode="json")
    return {"data": "d", "model_digest": "m", "model_content": "c", "seed": 0, "parameters": tree} | changes


def differing(here: dict[str, Any], run: dict[str, Any] | None = None) -> list[str]:
    return [row.what for row in identity_rows(run or facts(), here) if row.result == "differs"]


def test_equal_facts_are_equal_and_each_difference_is_named_causes_first() -> None:
    assert differing(facts()) == []
    assert differing(facts(data="x", seed=1)) == ["data", "seed"]
    assert differing(facts(model_digest="x", model_content="x")) == ["base model", "files of the base model"]
    coded = {"code of reward warm": "1"}
    assert differing(facts(**coded) | {"code of reward warm": "2"}, facts(**coded)) == ["code of reward warm"]
    assert differing(facts(start="2"), facts(start="1")) == ["adapters at the start"]
    other = parameters(seed=3, grpo={"steps": 9}, output="elsewhere", tracking={"images_every": 7})
    assert differing(facts(parameters=other.model_dump(mode="json"))) == ["grpo.steps", "seed"]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    history = pd.DataFrame(
        {"step": [1.0, 2.0], "reward/total": [0.1, 0.2], "eval/total": [None, 0.5], "seconds/step": [1.0, 2.0]}
    )
    for name in ("run", "here"):
        (tmp_path / name / "ar").mkdir(parents=True)
        (tmp_path / name / "ar/adapter.safetensors").write_bytes(b"weights")
        history.to_csv(tmp_path / name / "training.csv", index=False)
    return tmp_path / "run", tmp_path / "here"


def test_adapters_are_compared_bit_for_bit(folders: tuple[Path, Path]) -> None:
    run, here = folders
    sums = weight_sums(run)
    for edited in (here, run):
        (edited / "ar/adapter.safetensors").write_bytes(b"edited!")
        [row] = adapter_rows(sums, run, here)
        assert (row.what, row.result) == ("adapter ar/adapter.safetensors", "differs")
        (edited / "ar/adapter.safetensors").write_bytes(b"weights")
    (run / "ar/adapter.safetensors").unlink()
    assert [row.result for row in adapter_rows(sums, run, here)] == ["equal"], "the noted sum counts"
    (here / "ar/adapter.safetensors").unlink()
    assert [row.result for row in adapter_rows(sums, run, here)] == ["differs"]


def edit(folder: Path, column: str, step: int, value: float) -> None:
    table = pd.read_csv(folder / "training.csv")
    table.loc[step - 1, column] = value
    table.to_csv(folder / "training.csv", index=False)


def test_every_digit_of_every_step_counts_but_those_of_time(folders: tuple[Path, Path]) -> None:
    run, here = folders
    edit(here, "seconds/step", 2, 99.0)
    assert metric_row(run, here).result == "equal"
    edit(here, "reward/total", 2, 0.20000000000000004)
    row = metric_row(run, here)
    assert (row.what, row.run, row.here) == ("metric reward/total at step 2", "0.2", "0.20000000000000004")
    pd.read_csv(run / "training.csv").head(1).to_csv(here / "training.csv", index=False)
    row = metric_row(run, here)
    assert (row.run[:7], row.here[:7], row.result) == ("2 steps", "1 steps", "differs")


@pytest.mark.parametrize(
    ("column", "run_value", "value", "results"),
    [
        ("eval/total", 0.5, 0.5499, ["equal", "within tolerance"]),
        ("eval/total", 0.5, 0.5501, ["equal", "differs"]),
        ("eval/total", 0.5, 0.4501, ["equal", "within tolerance"]),
        ("eval/total", 0.5, float("nan"), ["equal", "differs"]),
        ("eval/total", float("nan"), float("nan"), ["equal", "equal"]),
        ("eval/total", float("nan"), 0.5, ["equal", "differs"]),
        ("reward/total", 0.2, 0.2501, ["differs", "equal"]),
        # Of large values the tolerance is a share.
        ("eval/total", 100.0, 104.9, ["equal", "within tolerance"]),
        ("eval/total", 100.0, 105.1, ["equal", "differs"]),
    ],
)
def test_final_metrics_may_differ_by_the_tolerance(
    folders: tuple[Path, Path], column: str, run_value: float, value: float, results: list[str]
) -> None:
    run, here = folders
    edit(run, column, 2, run_value)
    edit(here, column, 2, value)
    assert [row.result for row in tolerance_rows(run, here, 0.05)] == results
