"""Which baselines pair with which results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.evaluation.defaults import conditions_of, parameters
from tests.evaluation.test_compare import scores
from visual_grpo.errors import UserError
from visual_grpo.evaluation.compare import compare, join
from visual_grpo.evaluation.pairing import check_facts


def refusal(made: dict[str, Any], now: dict[str, Any]) -> list[str]:
    with pytest.raises(UserError) as caught:
        check_facts(made, now)
    first, *differences, remedy = str(caught.value).splitlines()
    assert first == "the baseline does not pair with this run:"
    assert "kedro run --pipeline=baseline" in remedy
    return differences


def test_a_baseline_made_under_other_conditions_is_refused_with_the_differences() -> None:
    made = {"seed": 0, "sampling": {"stock": {"steps": 10, "top_p": None}, "rollout": {"steps": 4}}, "old": 1}
    now = {"seed": 0, "sampling": {"stock": {"steps": 20, "top_p": None}}, "new": None}
    check_facts(made, made)
    assert refusal(made, now) == [
        "  sampling.stock.steps: 10 in the baseline, 20 now",
        "  sampling.rollout: set in the baseline, not set now",
        "  old: 1 in the baseline, not set now",
        "  new: not set in the baseline, None now",
    ]


@pytest.mark.parametrize(
    ("made", "now", "pairs"),
    [
        ((6, None), (6, None), True),
        ((6, None), (2, 10), True),
        ((6, 20), (6, 10), True),
        ((6, 20), (6, None), False),
        ((6, 20), (6, 21), False),
        ((6, None), (7, None), False),
    ],
)
def test_a_baseline_of_more_samples_has_those_that_are_asked_for(made, now, pairs: bool) -> None:
    before, after = ({"evaluation": {"images_per_prompt": each, "max_prompts": most}} for each, most in (made, now))
    if pairs:
        check_facts(before, after)
    else:
        assert len(refusal(before, after)) == 1


def test_controls_that_nobody_asks_for_any_more_are_no_difference() -> None:
    control = {"stock guidance_scale=3": {"steps": 10}}
    check_facts({"controls": control}, {"controls": {}})
    assert refusal({"controls": {}}, {"controls": control}) == [
        "  controls.stock guidance_scale=3: not set in the baseline, set now"
    ]
    assert len(refusal({"controls": control}, {"controls": {"stock guidance_scale=3": {"steps": 20}}})) == 1


def extent(frame: pd.DataFrame, each: int, most: int | None) -> pd.DataFrame:
    frame.attrs["facts"] = {"evaluation": {"images_per_prompt": each, "max_prompts": most}}
    return frame


def test_only_the_samples_that_were_asked_for_are_compared() -> None:
    baseline = extent(scores([0, 1, 2, 3, 4, 5]), 2, None)
    after = scores([1, 9, 4, 9, 7, 9])
    first_of_two = after[(after["index"] == 0) & (after["id"] != "p1")]
    first_of_two.attrs = after.attrs
    pairs = join(baseline, extent(first_of_two, 1, 2))
    assert list(zip(pairs["id"], pairs["total_baseline"], pairs["total_trained"], strict=True)) == [
        ("p0", 0, 1),
        ("p2", 4, 7),
    ]
    [total] = [e for e in compare(baseline, first_of_two, bootstrap_samples=200, seed=0) if e["name"] == "total"]
    assert (total["images"], total["difference"]) == (2, 2)


def test_samples_that_are_missing_for_no_such_reason_are_refused() -> None:
    baseline, after = extent(scores([0, 1, 2, 3]), 2, None), scores([0, 1, 2, 3])
    fewer = after.iloc[:2]
    fewer.attrs = after.attrs
    with pytest.raises(UserError, match="1 only in the baseline"):
        join(baseline, extent(fewer, 2, None))


def test_conditions_survive_the_file(tmp_path: Path) -> None:
    frame = scores([0.0, 1.0])
    frame.attrs["facts"] = conditions_of(parameters())
    frame.to_parquet(tmp_path / "scores.parquet")
    check_facts(pd.read_parquet(tmp_path / "scores.parquet").attrs["facts"], frame.attrs["facts"])
