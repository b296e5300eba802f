from typing import Any

import numpy as np
import pandas as pd
import pytest

from visual_grpo.evaluation.plots import differences, reward_curve


def entry(name: str, difference: float | None, split: str = "held_out", sampler: str = "stock") -> dict[str, Any]:
    low, high = (None, None) if difference is None else (difference - 0.1, difference + 0.2)
    where = {"name": name, "split": split, "sampler": sampler}
    return where | {"difference": difference, "ci_low": low, "ci_high": high}


def test_each_reward_has_its_panel_and_each_split_its_column() -> None:
    names = ["total", "shapes", "shapes/color", "entropy"]
    entries = [entry(n, 0.1, split) for split in ("held_out", "eval") for n in names]
    panels = differences(entries).axes
    assert len(panels) == 3 * 2
    labels = [[tick.get_text() for tick in panel.get_yticklabels()] for panel in panels[::2]]
    assert labels == [["total"], ["shapes", "shapes/color"], ["entropy"]]
    assert [panel.get_title() for panel in panels[:2]] == ["held-out prompts", "eval prompts"]


def test_points_and_intervals_are_where_the_numbers_say() -> None:
    (panel,) = differences([entry("total", 0.3), entry("total", -0.2, sampler="rollout")]).axes
    drawn: list[Any] = list(panel.containers)
    bars = [container.lines[2][0].get_segments()[0][:, 0].tolist() for container in drawn]
    assert [list(container.lines[0].get_xdata()) for container in drawn] == [[0.3], [-0.2]]
    assert bars == [pytest.approx([0.2, 0.5]), pytest.approx([-0.3, 0.0])]


def test_an_undefined_difference_leaves_its_row_empty() -> None:
    (panel,) = differences([entry("total", None)]).axes
    drawn: list[Any] = list(panel.containers)
    assert len(drawn[0].lines[0].get_xdata()) == 0


def test_reward_curve_shows_steps_and_evaluations() -> None:
    history = pd.DataFrame({"step": [1, 2, 3], "reward/total": [0.1, 0.2, 0.3], "eval/total": [None, 0.5, None]})
    (axis,) = reward_curve(history).axes
    curves = [np.asarray(line.get_xydata()).tolist() for line in axis.lines]
    assert curves[0] == [[1, 0.1], [2, 0.2], [3, 0.3]]
    assert curves[2] == [[2, 0.5]]
    assert len(reward_curve(history[["step", "reward/total"]]).axes[0].lines) == 2
