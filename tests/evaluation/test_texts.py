"""Text samples from the policy to the report."""

from pathlib import Path

import pandas as pd
import pytest

from tests.evaluation.answerer import Answerer, Overlap, records
from tests.evaluation.painter import EVAL_SAMPLER, ROLLOUT
from visual_grpo.common.errors import UserError
from visual_grpo.evaluation.compare import compare, join
from visual_grpo.evaluation.draw import draw_and_score, plan_images, read_scores
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
            Answerer(skill),
            scorer,
            plan,
            {"rollout": ROLLOUT, "eval": EVAL_SAMPLER},
            tmp_path / name,
            batch_size=4,
            facts={},
        )
    return read_scores(tmp_path / "baseline"), read_scores(tmp_path / "trained")


def test_ratios_are_compared_as_sums_over_sums(answers: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    entries = {
        entry["name"]: entry for entry in compare(*answers, bootstrap_samples=200, seed=0) if entry["sampler"] == "eval"
    }
    assert list(entries) == ["total", "overlap", "overlap/ciou"]
    ratio = entries["overlap/ciou"]
    assert not ratio["optimised"]
    for table, mean in zip(answers, ("baseline_mean", "trained_mean"), strict=True):
        rows = table[table["sampler"] == "eval"]
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
