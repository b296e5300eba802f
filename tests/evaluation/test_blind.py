"""The share of blind choices, by hand."""

import math

import numpy as np
import pytest

from visual_grpo.evaluation.blind import preference


def test_prompts_count_the_same_however_many_choices_they_have() -> None:
    found = preference([1, 1, 1, 0, 0.5, 1], ["a", "a", "a", "b", "b", "c"])
    shares = np.array([1, 0.25, 1])
    half = 4.302653 * shares.std(ddof=1) / math.sqrt(3)  # Student's quantile 0.975 of 2 degrees of freedom.
    assert found.share == pytest.approx(0.75)
    assert found.ci_low == pytest.approx(max(0, 0.75 - half), abs=1e-5)
    assert found.ci_high == 1.0
    assert (found.prompts, found.choices, found.ties) == (3, 6, 1)
    assert found.interval.startswith("t-interval")


def test_several_choices_on_one_prompt_are_no_more_evidence_for_others() -> None:
    units = [f"p{number}" for number in range(10)]
    shares = [1.0, 1, 1, 0, 1, 1, 0, 1, 1, 1]
    one, many = preference(shares, units), preference(np.repeat(shares, 5), np.repeat(units, 5).tolist())
    assert (one.ci_low, one.ci_high) == pytest.approx((many.ci_low, many.ci_high))


@pytest.mark.parametrize(("share", "verdict"), [(1.0, "better"), (0.0, "worse"), (0.5, "not shown")])
def test_prompts_that_all_agree_leave_doubt(share: float, verdict: str) -> None:
    found = preference([share] * 10, [f"p{number}" for number in range(10)])
    assert found.interval.startswith("Wilson")
    assert found.ci_low < found.ci_high
    assert found.verdict == verdict
    square = 1.959963985**2
    if share == 1:
        assert found.ci_low == pytest.approx(10 / (10 + square))
        assert found.ci_high == 1


def test_of_nothing_nothing_is_said() -> None:
    found = preference([], [])
    assert math.isnan(found.share)
    assert (found.ci_low, found.ci_high, found.verdict) == (0, 1, "not shown")


def test_the_interval_holds_what_it_says() -> None:
    generator = np.random.default_rng(0)
    units = np.repeat([f"p{number}" for number in range(30)], 3).tolist()
    inside = []
    for _ in range(400):
        taste = generator.beta(3, 2, 30)
        found = preference((generator.random(90) < np.repeat(taste, 3)).astype(float), units)
        inside.append(found.ci_low <= 0.6 <= found.ci_high)
    assert 0.92 < np.mean(inside) < 0.98
