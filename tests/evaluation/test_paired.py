from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest, ttest_1samp

from visual_grpo.evaluation.paired import (
    CHUNK,
    detectable_gain,
    paired_difference,
    paired_ratio_bootstrap,
    preference,
    t_interval,
    units_needed,
)

NAN = float("nan")


def test_means_interval_and_win_rate_by_hand() -> None:
    found = paired_difference([1, 2, 3, 4], [2, 2, 2, 6], ["a", "a", "b", "c"])
    assert (found.units, found.images, found.unscored) == (3, 4, 0)
    # Mean differences of the prompts: 0.5, -1, 2 with standard deviation 1.5; t of 2 degrees of freedom is 4.302653.
    assert found.baseline == pytest.approx((1.5 + 3 + 4) / 3)
    assert found.trained == pytest.approx((2 + 2 + 6) / 3)
    assert found.difference == pytest.approx(0.5)
    assert found.ci_low == pytest.approx(0.5 - 4.302653 * 1.5 / math.sqrt(3))
    assert found.ci_high == pytest.approx(0.5 + 4.302653 * 1.5 / math.sqrt(3))
    assert found.win_rate == (1 + 0.5 + 0 + 1) / 4


@pytest.mark.parametrize(
    ("before", "after", "prompts", "counts", "means", "interval"),
    [
        ([1, 2, 3], [1, 2, 3], "abc", (3, 3, 0), (2, 2, 0, 0.5), (0, 0)),
        # A pair counts only if both are scored; without any, nothing is defined.
        ([1, NAN, 5, 2], [2, 9, NAN, 2], "abcd", (2, 2, 2), (1.5, 2, 0.5, 0.75), None),
        ([NAN, 1], [1, NAN], "ab", (0, 0, 2), (NAN, NAN, NAN, NAN), (NAN, NAN)),
        # A single prompt gives no interval; each counts the same, however many of its images were scored.
        ([1, 2, 3], [2, 4, 4], "aaa", (1, 3, 0), (2, 10 / 3, 4 / 3, 1), (NAN, NAN)),
        ([0, 0, 0, 0], [0, 0, 0, 1], "aaab", (2, 4, 0), (0, 0.5, 0.5, 0.625), None),
    ],
)
def test_a_prompt_counts_once_and_an_unscored_pair_not_at_all(before, after, prompts, counts, means, interval) -> None:
    found = paired_difference(before, after, list(prompts))
    assert (found.units, found.images, found.unscored) == counts
    measured = (found.baseline, found.trained, found.difference, found.win_rate)
    assert measured == pytest.approx(means, nan_ok=True)
    if interval is not None:
        assert (found.ci_low, found.ci_high) == pytest.approx(interval, nan_ok=True)


def test_another_confidence_gives_the_bounds_of_one_sided_tests() -> None:
    rng = np.random.default_rng(4)
    differences, clusters = rng.normal(size=40), [str(i // 2) for i in range(40)]
    found = paired_difference(np.zeros(40), differences, clusters, confidence=1 - 2 * 0.001)
    means = pd.Series(differences).groupby(clusters).mean()
    assert found.ci_low == pytest.approx(ttest_1samp(means, 0, alternative="greater").confidence_interval(0.999).low)
    assert found.ci_high == pytest.approx(ttest_1samp(means, 0, alternative="less").confidence_interval(0.999).high)


@pytest.mark.parametrize(("prompts", "low"), [(3, -0.4152), (5, -0.0436), (10, 0.3830), (100, 0.9276)])
def test_equal_differences_leave_doubt(prompts: int, low: float) -> None:
    """Exact bounds of k of k, as tables have them: 0.2924, 0.4782, 0.6915, 0.9638."""
    for sign, ends in ((1, (low, 1)), (-1, (-1, -low))):
        assert t_interval(np.full(prompts, 0.1) * sign) == pytest.approx(np.array(ends) / 10, abs=1e-5)
    assert not np.any(t_interval(np.zeros(prompts)))


def test_the_interval_of_each_row_is_that_of_the_row_alone() -> None:
    rows = np.random.default_rng(5).normal(size=(3, 2, 7))
    low, high = t_interval(rows, 0.9)
    assert low.shape == high.shape == (3, 2)
    expected = ttest_1samp(rows[1, 0], 0).confidence_interval(0.9)
    assert (low[1, 0], high[1, 0]) == pytest.approx((expected.low, expected.high))
    assert np.isnan(t_interval(rows[..., :1])).all()


def test_a_ratio_is_the_sum_of_numerators_over_the_sum_of_denominators() -> None:
    # IoU of three masks of two prompts; the largest mask dominates.
    before = ([1, 1, 2], [2, 4, 10])
    after = ([2, 1, 8], [2, 5, 10])
    found = paired_ratio_bootstrap(before, after, ["a", "a", "b"], samples=200, seed=0)
    assert (found.units, found.images, found.unscored) == (2, 3, 0)
    assert found.baseline == 4 / 16
    assert found.trained == 11 / 17
    assert found.difference == 11 / 17 - 4 / 16
    assert found.win_rate == pytest.approx(2 / 3)  # 1/2 < 2/2, 1/4 > 1/5, 2/10 < 8/10
    # Resamples of two prompts: a twice, both, b twice.
    assert found.ci_low == pytest.approx(3 / 7 - 2 / 6)
    assert found.ci_high == pytest.approx(8 / 10 - 2 / 10)


def test_a_ratios_interval_depends_on_the_seed_alone() -> None:
    before, after = np.random.default_rng(0).uniform(size=(2, 60))
    clusters = [f"p{i % 20:02d}" for i in range(60)]
    first, again, other = (
        paired_ratio_bootstrap((before, np.ones(60)), (after, np.ones(60)), clusters, samples=CHUNK + 100, seed=seed)
        for seed in (3, 3, 4)
    )
    assert first == again
    assert other.ci_low != first.ci_low


def test_a_ratios_interval_covers_95_percent_of_the_resamples() -> None:
    before, after = np.random.default_rng(0).uniform(size=(2, 200))
    ones, clusters = np.ones(200), [str(i) for i in range(200)]
    found = paired_ratio_bootstrap((before, ones), (after, ones), clusters, samples=20_000, seed=0)
    error = (after - before).std() / math.sqrt(200)  # Of a mean over so many resamples it is nearly normal.
    assert found.ci_high - found.ci_low == pytest.approx(2 * 1.959964 * error, rel=0.03)


def test_a_pair_without_a_defined_ratio_is_left_out_of_the_win_rate() -> None:
    found = paired_ratio_bootstrap(([0, 1], [0, 2]), ([0, 2], [0, 2]), ["a", "b"], samples=200, seed=0)
    assert (found.images, found.baseline, found.trained, found.win_rate) == (2, 0.5, 1.0, 1.0)
    assert math.isnan(found.ci_low)  # A resample of prompt a alone has no defined ratio.
    nothing = paired_ratio_bootstrap(([NAN], [NAN]), ([1], [2]), ["a"], samples=200, seed=0)
    assert (nothing.images, nothing.unscored) == (0, 1)
    assert math.isnan(nothing.difference)
    assert math.isnan(nothing.win_rate)


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match=r"\(2,\), \(3,\) and 3"):
        paired_difference([1, 2], [1, 2, 3], ["a", "b", "c"])
    with pytest.raises(ValueError, match=r"4 columns of 1 numbers.*\[4, 2\]"):
        paired_ratio_bootstrap(([1, 1], [1, 1]), ([1, 1], [1, 1]), ["a"], samples=200, seed=0)


def test_many_units_give_the_normal_formula() -> None:
    # Quantiles of the normal distribution: 1.959964 for 2.5%, 1.281552 for 90%, 0.841621 for 80%.
    assert detectable_gain(2.0, 40_000, 0.025) == pytest.approx(2 * (1.959964 + 1.281552) / 200, rel=1e-4)
    assert detectable_gain(2.0, 40_000, 0.025, power=0.8) == pytest.approx(2 * (1.959964 + 0.841621) / 200, rel=1e-4)


@pytest.mark.parametrize("gain", [0.5, 0.05, 0.02])
def test_units_needed_are_the_fewest_that_detect_the_gain(gain: float) -> None:
    units = units_needed(gain, 0.1, 0.05 / 52)
    assert detectable_gain(0.1, units, 0.05 / 52) <= gain < detectable_gain(0.1, units - 1, 0.05 / 52)


def test_what_is_undefined_or_impossible_is_said() -> None:
    assert units_needed(0.01, 0.0, 0.01) == 2
    assert math.isnan(detectable_gain(0.1, 1, 0.01))
    assert math.isnan(detectable_gain(math.nan, 34, 0.01))
    for gain, sd in ((0.0, 0.1), (-1.0, 0.1), (math.nan, 0.1), (0.1, math.nan), (0.1, math.inf)):
        with pytest.raises(ValueError, match="gain above 0 and a finite standard deviation"):
            units_needed(gain, sd, 0.01)
    with pytest.raises(ValueError, match="needs more than 10,000,000 units"):
        units_needed(1e-5, 0.1, 0.01)
    for alpha, power in ((0.0, 0.9), (0.95, 0.9), (0.01, 1.0)):
        with pytest.raises(ValueError, match="0 < alpha < power < 1"):
            detectable_gain(0.1, 34, alpha, power)


def test_prompts_count_the_same_however_many_choices_they_have() -> None:
    found = preference([1, 1, 1, 0, 0.5, 1], ["a", "a", "a", "b", "b", "c"])
    assert found.mean_share == pytest.approx(0.75)
    assert (found.prompts, found.choices, found.ties, found.effective) == (3, 6, 1, 3)


def test_choices_of_one_prompt_count_for_as_many_independent_ones_as_the_prompts_differ() -> None:
    """Five prompts of four choices all won, five of four half won: k p (1 - p) / var = 10 * 0.1875 / 0.0625."""
    found = preference([1] * 20 + [1, 1, 0, 0] * 5, [f"p{choice // 4}" for choice in range(40)])
    assert found.effective == pytest.approx(30 * (2.022691 / 2.262157) ** 2)  # Student's quantiles 0.975 of 39 and 9.
    exact = binomtest(18, 24).proportion_ci(0.95, method="exact")  # 75% of nearly 24.
    assert (found.ci_low, found.ci_high) == pytest.approx((exact.low, exact.high), abs=1e-3)


@pytest.mark.parametrize(
    ("share", "prompts", "verdict"),
    [(1.0, 10, "better"), (0.0, 10, "worse"), (0.5, 10, "not shown"), (1.0, 9, "not shown")],
)
def test_prompts_that_all_agree_leave_doubt(share: float, prompts: int, verdict: str) -> None:
    found = preference([share] * prompts, [f"p{number}" for number in range(prompts)])
    assert found.ci_low < found.ci_high
    assert found.verdict == verdict
    if share == 1:
        assert (found.ci_low, found.ci_high) == pytest.approx((0.025 ** (1 / prompts), 1))


@pytest.mark.parametrize("prompts", [10, 17, 26, 60])
def test_voters_without_a_preference_are_seldom_said_to_have_one(prompts: int) -> None:
    shown = sum(
        math.comb(prompts, won)
        for won in range(prompts + 1)
        if preference([1] * won + [0] * (prompts - won), [*map(str, range(prompts))]).verdict != "not shown"
    )
    assert 0.01 < shown / 2**prompts < 0.05


def test_of_nothing_nothing_is_said() -> None:
    found = preference([], [])
    assert math.isnan(found.mean_share)
    assert (found.ci_low, found.ci_high, found.verdict) == (0, 1, "not shown")
