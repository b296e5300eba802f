"""The plots show the numbers that they are given."""

from __future__ import annotations

import numpy as np
import pandas as pd

from tests.evaluation.painter import records
from visual_grpo.evaluation.plots import Curves, base_value, training_curves
from visual_grpo.evaluation.samples import distinct_prompts


def lines(curves: Curves) -> dict[str, list[list[float]]]:
    """Label -> points of a figure's lines."""
    (axis,) = curves.figure.axes
    found = {str(line.get_label()): np.asarray(line.get_xydata()).tolist() for line in axis.lines}
    return {label: points for label, points in found.items() if not label.startswith("_")}


def test_training_curves_are_of_the_reward_and_of_each_metric_that_is_there() -> None:
    history = pd.DataFrame(
        {"step": [1, 2, 3], "reward/total": [0.1, 0.2, 0.3], "eval/total": [None, 0.5, None], "ar/kl": [0.0, 0.1, 0.2],
         "dit/kl": [0.0, np.inf, 1.0], "ar/update_1/clip_fraction": [9.0] * 3, "entropy": [2.0] * 3,
         "update_1/entropy": [3.0] * 3, "reward/unscored_share": [0.0] * 3}
    )  # fmt: skip
    reward, kl, entropy = training_curves(history, base=0.05)
    steps = [[1, 0.1], [2, 0.2], [3, 0.3]]
    assert lines(reward) == {"training samples": steps, "eval prompts": [[0, 0.05], [2, 0.5]]}
    assert lines(kl) == {"ar": [[1, 0.0], [2, 0.1], [3, 0.2]], "dit": [[1, 0.0], [3, 1.0]]}
    assert lines(entropy) == {"all": [[1, 2], [2, 2], [3, 2]]}
    of_one = training_curves(history[["step", "reward/total", "ar/kl"]], None)[1]
    assert [curve.figure.axes[0].get_legend() is not None for curve in (kl, entropy, of_one)] == [True, False, True]
    long = pd.DataFrame({"step": range(30), "reward/total": [0.0] * 30})
    assert [*lines(training_curves(long, None)[0])] == ["training samples (smoothed)"]
    assert reward.data_uri == training_curves(history, base=0.05)[0].data_uri
    bad = history.assign(**{"reward/unscored_share": [0, 0.5, 0]})[["step", "reward/total", "reward/unscored_share"]]
    reward, unscored = training_curves(bad, None)
    assert "eval prompts" not in lines(reward)
    assert unscored.title == "Unscored share"
    clipped = bad[["step", "reward/total"]].assign(**{"ar/clip_fraction": [0.0] * 3, "dit/clip_fraction": [0, 0.1, 0]})
    assert [list(lines(curve)) for curve in training_curves(clipped, None)[1:]] == [["dit"]], "of ar nothing is clipped"


def test_the_first_point_is_what_trainings_evaluation_would_have_measured() -> None:
    prompts = records("eval", 6)
    worths = {record.id: 2.0**number for number, record in enumerate(prompts)}
    rows = [
        {"sampler": sampler, "split": "eval", "id": name, "index": index, "total": worth + 1000 * (index or other)}
        for name, worth in worths.items()
        for index in (0, 1)
        for other, sampler in enumerate(("eval", "rollout"))
    ]
    frame = pd.DataFrame(rows)
    assert base_value(frame, 3) == sum(worths[record.id] for record in distinct_prompts(prompts, 3)) / 3
    assert base_value(frame, None) == 63 / 6
    assert base_value(frame[frame["sampler"] == "rollout"], 3) is None
