"""Text samples from the policy to the report."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.evaluation.answerer import Answerer, Overlap, records
from tests.evaluation.painter import ROLLOUT, STOCK
from tests.evaluation.reports import written
from visual_grpo.errors import UserError
from visual_grpo.evaluation.compare import compare, join
from visual_grpo.evaluation.generate import draw_and_score, plan_images, read_scores
from visual_grpo.images import read_image
from visual_grpo.rewards.combine import RewardSet


@pytest.fixture
def answers(tmp_path: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The scores of a baseline and of a better answerer, read from their folders."""
    (tmp_path / "images").mkdir()
    found = records(tmp_path / "images", "held_out", 5)
    plan = plan_images({"held_out": found}, seed=0, images_per_prompt=2, max_prompts=None)
    scorer = RewardSet({"overlap": (Overlap(), 1.0)})
    for name, skill in (("baseline", 0.0), ("trained", 0.8)):
        draw_and_score(
            Answerer(skill), scorer, plan, {"rollout": ROLLOUT, "stock": STOCK}, tmp_path / name, batch_size=4, facts={}
        )
    return read_scores(tmp_path / "baseline"), read_scores(tmp_path / "trained")


def test_an_answer_is_saved_as_text_and_as_the_picture_drawn_by_the_reward(
    answers: tuple[pd.DataFrame, pd.DataFrame], tmp_path: Path
) -> None:
    baseline, _ = answers
    assert len(baseline) == 2 * 5 * 2
    assert "source" not in baseline  # An answer's picture shows its image.
    for row in baseline.to_dict("records"):
        pixels = np.asarray(read_image(tmp_path / "baseline" / row["file"]))
        red = (pixels == (255, 0, 0)).all(-1).any(0)
        assert int(red.argmax()) == int(row["answer"])


def test_ratios_are_compared_as_sums_over_sums(answers: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    entries = {
        entry["name"]: entry
        for entry in compare(*answers, bootstrap_samples=200, seed=0)
        if entry["sampler"] == "stock"
    }
    assert list(entries) == ["total", "overlap", "overlap/ciou"]
    ratio = entries["overlap/ciou"]
    assert not ratio["optimised"]
    for table, mean in zip(answers, ("baseline_mean", "trained_mean"), strict=True):
        rows = table[table["sampler"] == "stock"]
        above, below = (rows[f"{side}/overlap/ciou"].sum() for side in ("numerator", "denominator"))
        assert ratio[mean] == pytest.approx(above / below)
        assert ratio[mean] != pytest.approx(rows["reward/overlap"].mean())
    assert ratio["ci_low"] > 0
    assert ratio["win_rate"] == entries["overlap"]["win_rate"]
    joined = join(*answers)
    assert (joined["answer_baseline"] != joined["answer_trained"]).any()


def test_a_ratio_in_only_one_of_the_tables_is_refused(answers: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    before, after = answers
    columns = [f"{side}/overlap/ciou" for side in ("numerator", "denominator")]
    with pytest.raises(UserError, match=r"scores: 1 only in the trained results \('numerator/overlap/ciou'\)"):
        compare(before.drop(columns=columns), after, bootstrap_samples=200, seed=0)


def test_the_report_of_answers(answers: tuple[pd.DataFrame, pd.DataFrame], tmp_path: Path) -> None:
    folder = written(tmp_path, *answers)
    assert "overlap/ciou" in (folder / "evaluation.html").read_text(encoding="utf-8")
    assert json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))["rewards"]
    assert (np.asarray(read_image(folder / "samples.png")) == (255, 0, 0)).all(-1).any()
