"""The metrics that MLflow gets."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from visual_grpo.tracking.metrics import MOST, tracked

COLUMNS = ["reward/total", "reward/total_std", "reward/shapes", "reward/shapes_std", "part/shapes/all", "kl", "entropy"]
ROW = {f"{module}/{name}": 1.0 for module in ("ar", "dit") for name in COLUMNS} | {
    "step": 3.0,
    "reward/total": 2.0,
    "eval/total": 3.0,
    "seconds/cpu": 4.0,
    "seconds/step": 5.0,
}


def test_of_several_modules_each_has_its_curves() -> None:
    both = tracked(ROW, ("ar", "dit"), ("shapes",))
    own = {"reward/total", "reward/total_std", "reward/shapes", "kl", "entropy"}
    shared = {"reward/total": 2.0, "eval/total": 3.0, "seconds/step": 5.0}
    assert both == {f"{module}/{name}": 1.0 for module in ("ar", "dit") for name in own} | shared


def test_a_single_module_has_no_prefix() -> None:
    row = dict.fromkeys([*COLUMNS, "ar/kl"], 1.0)
    assert tracked(row, ("vl",), ()).keys() == {"reward/total", "reward/total_std", "kl", "entropy"}


@pytest.mark.parametrize("rewards", [("shapes", "palette"), tuple("abcd")])
def test_a_run_of_two_modules_leaves_room_for_its_result(rewards: tuple[str, ...]) -> None:
    """Of all columns that a training of two modules writes (tests/tracking/columns.csv)."""
    names = list(pd.read_csv(Path(__file__).with_name("columns.csv")).columns)
    names += [f"{module}/reward/{name}" for module in ("ar", "dit") for name in rewards]
    shown = tracked(dict.fromkeys(names, 0.0), ("ar", "dit"), rewards)
    assert MOST - 20 >= len(shown) >= 25
