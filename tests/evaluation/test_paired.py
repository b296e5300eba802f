import math
from dataclasses import asdict

import numpy as np
import pytest

from visual_grpo.evaluation.paired import CHUNK, paired_bootstrap, paired_ratio_bootstrap

NAN = float("nan")


def test_means_difference_and_win_rate_by_hand() -> None:
    found = paired_bootstrap([1, 2, 3, 4], [2, 2, 2, 6], ["a", "a", "b", "c"], samples=200, seed=0)
    assert (found.units, found.images, found.unscored) == (3, 4, 0)
    assert (found.baseline_mean, found.trained_mean, found.difference) == (2.5, 3.0, 0.5)
    assert found.win_rate == (1 + 0.5 + 0 + 1) / 4


def test_ties_count_half_and_a_constant_difference_has_no_width() -> None:
    found = paired_bootstrap([1, 2, 3], [1, 2, 3], ["a", "b", "c"], samples=200, seed=0)
    assert (found.difference, found.ci_low, found.ci_high, found.win_rate) == (0, 0, 0, 0.5)


def test_a_pair_counts_only_if_both_images_are_scored() -> None:
    found = paired_bootstrap([1, NAN, 5, 2], [2, 9, NAN, 2], ["a", "b", "c", "d"], samples=200, seed=0)
    assert (found.units, found.images, found.unscored) == (2, 2, 2)
    assert (found.baseline_mean, found.trained_mean, found.difference) == (1.5, 2.0, 0.5)


def test_nothing_scored_is_undefined_not_zero() -> None:
    found = paired_bootstrap([NAN, 1], [1, NAN], ["a", "b"], samples=200, seed=0)
    assert (found.images, found.unscored) == (0, 2)
    assert math.isnan(found.difference)
    assert math.isnan(found.win_rate)
    assert math.isnan(found.ci_low)


def test_a_single_prompt_gives_no_interval() -> None:
    found = paired_bootstrap([1, 2, 3], [2, 4, 4], ["a", "a", "a"], samples=200, seed=0)
    assert found.difference == pytest.approx(4 / 3)
    assert math.isnan(found.ci_low)
    assert math.isnan(found.ci_high)


def test_same_seed_same_interval_whatever_the_order_of_images() -> None:
    rng = np.random.default_rng(0)
    before, after = rng.normal(size=60), rng.normal(size=60)
    clusters = [f"p{i % 20:02d}" for i in range(60)]
    first = paired_bootstrap(before, after, clusters, samples=CHUNK + 100, seed=3)
    order = rng.permutation(60)
    again = paired_bootstrap(before[order], after[order], [clusters[i] for i in order], CHUNK + 100, seed=3)
    assert (first.ci_low, first.ci_high) == pytest.approx((again.ci_low, again.ci_high), abs=1e-12)
    other = paired_bootstrap(before, after, clusters, samples=CHUNK + 100, seed=4)
    assert other.ci_low != first.ci_low


def test_interval_matches_theory_for_independent_images() -> None:
    rng = np.random.default_rng(1)
    differences = rng.normal(0.3, 2.0, size=400)
    found = paired_bootstrap(np.zeros(400), differences, [str(i) for i in range(400)], samples=20000, seed=0)
    half_width = 1.96 * differences.std() / math.sqrt(400)
    assert found.ci_low == pytest.approx(differences.mean() - half_width, abs=0.02)
    assert found.ci_high == pytest.approx(differences.mean() + half_width, abs=0.02)


def test_copies_of_an_image_add_no_evidence() -> None:
    rng = np.random.default_rng(2)
    once = rng.normal(size=50)
    names = [str(i) for i in range(50)]
    single = paired_bootstrap(np.zeros(50), once, names, samples=20000, seed=0)
    copies = paired_bootstrap(np.zeros(400), np.repeat(once, 8), np.repeat(names, 8).tolist(), 20000, seed=0)
    naive = paired_bootstrap(np.zeros(400), np.repeat(once, 8), [str(i) for i in range(400)], 20000, seed=0)
    width = single.ci_high - single.ci_low
    assert copies.ci_high - copies.ci_low == pytest.approx(width, rel=0.02)
    assert naive.ci_high - naive.ci_low == pytest.approx(width / math.sqrt(8), rel=0.05)


def test_prompts_are_weighted_by_their_number_of_images() -> None:
    # Means of resamples are sums over images by numbers of images: 0, 1/4, 1 or between, never beyond.
    found = paired_bootstrap([0, 0, 0, 0], [0, 0, 0, 1], ["a", "a", "a", "b"], samples=4000, seed=0)
    assert (found.difference, found.ci_low, found.ci_high) == (0.25, 0.0, 1.0)


def test_coverage_on_data_with_known_difference() -> None:
    rng = np.random.default_rng(3)
    clusters = [str(p) for p in range(40) for _ in range(4)]
    covered = 0
    for seed in range(200):
        prompt_effect = np.repeat(rng.normal(0.5, 1.0, size=40), 4)
        found = paired_bootstrap(np.zeros(160), prompt_effect + rng.normal(size=160), clusters, 500, seed)
        covered += found.ci_low <= 0.5 <= found.ci_high
    assert 0.89 <= covered / 200 <= 0.98  # a bootstrap over images covers 0.74 here


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match=r"\(2,\), \(3,\) and 3"):
        paired_bootstrap([1, 2], [1, 2, 3], ["a", "b", "c"], samples=200, seed=0)


def test_a_ratio_is_the_sum_of_numerators_over_the_sum_of_denominators() -> None:
    # IoU of three masks of two prompts; the largest mask dominates.
    before = ([1, 1, 2], [2, 4, 10])
    after = ([2, 1, 8], [2, 5, 10])
    found = paired_ratio_bootstrap(before, after, ["a", "a", "b"], samples=200, seed=0)
    assert (found.units, found.images, found.unscored) == (2, 3, 0)
    assert found.baseline_mean == 4 / 16
    assert found.trained_mean == 11 / 17
    assert found.difference == 11 / 17 - 4 / 16
    assert found.win_rate == pytest.approx(2 / 3)  # 1/2 < 2/2, 1/4 > 1/5, 2/10 < 8/10
    # Resamples of two prompts: a twice, both, b twice.
    assert found.ci_low == pytest.approx(3 / 7 - 2 / 6)
    assert found.ci_high == pytest.approx(8 / 10 - 2 / 10)


def test_a_ratios_interval_is_that_of_a_direct_resampling() -> None:
    rng = np.random.default_rng(5)
    clusters = np.repeat(np.arange(25), rng.integers(1, 5, size=25))
    below = rng.integers(5, 100, size=(2, len(clusters))).astype(float)
    above = below * rng.uniform(0.2, 0.9, size=below.shape)
    below[0, 3] = above[0, 3] = NAN
    found = paired_ratio_bootstrap(
        (above[0], below[0]), (above[1], below[1]), clusters.astype(str).tolist(), samples=20000, seed=0
    )
    kept = np.arange(len(clusters)) != 3
    members = [np.flatnonzero(kept & (clusters == cluster)) for cluster in range(25)]
    members = [rows for rows in members if len(rows)]
    differences = []
    for _ in range(20000):
        rows = np.concatenate([members[i] for i in rng.integers(len(members), size=len(members))])
        ratios = above[:, rows].sum(1) / below[:, rows].sum(1)
        differences.append(ratios[1] - ratios[0])
    low, high = np.quantile(differences, [0.025, 0.975])
    assert (found.images, found.unscored) == (len(clusters) - 1, 1)
    assert found.ci_low == pytest.approx(low, abs=0.03 * (high - low))
    assert found.ci_high == pytest.approx(high, abs=0.03 * (high - low))


def test_a_ratio_with_denominators_of_one_is_the_mean() -> None:
    rng = np.random.default_rng(6)
    before, after = rng.uniform(size=(2, 30))
    clusters = [str(i // 3) for i in range(30)]
    mean = paired_bootstrap(before, after, clusters, samples=500, seed=2)
    ratio = paired_ratio_bootstrap((before, np.ones(30)), (after, np.ones(30)), clusters, samples=500, seed=2)
    assert asdict(ratio) == pytest.approx(asdict(mean))


def test_a_pair_without_a_defined_ratio_is_left_out_of_the_win_rate() -> None:
    found = paired_ratio_bootstrap(([0, 1], [0, 2]), ([0, 2], [0, 2]), ["a", "b"], samples=200, seed=0)
    assert (found.images, found.baseline_mean, found.trained_mean, found.win_rate) == (2, 0.5, 1.0, 1.0)
    assert math.isnan(found.ci_low)  # A resample of prompt a alone has no defined ratio.
    nothing = paired_ratio_bootstrap(([NAN], [NAN]), ([1], [2]), ["a"], samples=200, seed=0)
    assert (nothing.images, nothing.unscored) == (0, 1)
    assert math.isnan(nothing.difference)
    assert math.isnan(nothing.win_rate)


def test_columns_of_a_ratio_must_agree() -> None:
    with pytest.raises(ValueError, match=r"4 columns of 1 numbers.*\[4, 2\]"):
        paired_ratio_bootstrap(([1, 1], [1, 1]), ([1, 1], [1, 1]), ["a"], samples=200, seed=0)
