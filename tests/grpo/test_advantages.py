from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from visual_grpo.grpo.advantages import Scale, gdpo_rewards, group_advantages, zero_variance_groups
from visual_grpo.grpo.metrics import variance_shares

NAN = float("nan")
SCALES: list[Scale] = ["group", "batch", "batch_centred", "none"]


ROOT = 2**0.5 + 0.5
SECOND = 300**0.5 + 0.5
RAW = (131 / 3) ** 0.5 + 0.5
"""Of 0, 2, 10, 14: mean 6.5, squares 42.25 + 20.25 + 12.25 + 56.25. TRL's ``scale_rewards="batch"`` has the same."""
CENTRED = ((1 + 1 + 4 + 4) / 3) ** 0.5 + 0.5


@pytest.mark.parametrize(
    ("scale", "groups", "expected"),
    [
        # Group 1: mean 2, std 1. Group 2: mean 20, std sqrt((100 + 100 + 400) / 2) = sqrt(300).
        ("group", [[1, 2, 3], [10, 10, 40]], [-1 / 1.5, 0, 1 / 1.5, -10 / SECOND, -10 / SECOND, 20 / SECOND]),
        ("group", [[1, NAN, 3], [NAN, NAN, 5]], [-1 / ROOT, 0, 1 / ROOT, 0, 0, 0]),
        ("batch", [[0, 2], [10, 14]], [-1 / RAW, 1 / RAW, -2 / RAW, 2 / RAW]),
        ("batch", [[0, 2, NAN], [10, 14, NAN]], [-1 / RAW, 1 / RAW, 0, -2 / RAW, 2 / RAW, 0]),
        ("batch", [[3, NAN]], [0, 0]),
        ("batch", [[NAN, NAN]], [0, 0]),
        ("batch_centred", [[0, 2], [10, 14]], [-1 / CENTRED, 1 / CENTRED, -2 / CENTRED, 2 / CENTRED]),
        ("none", [[0, 2], [10, 14]], [-1, 1, -2, 2]),
    ],
)
def test_each_scale_by_hand(scale: Scale, groups: list[list[float]], expected: list[float]) -> None:
    rewards = torch.tensor(groups, dtype=torch.float32)
    got = group_advantages(rewards.flatten(), rewards.shape[1], scale=scale, epsilon=0.5, clip=None)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float32), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale", SCALES)
def test_a_constant_group_gets_exactly_zero(scale: Scale) -> None:
    # The mean of these equal floats is not bit-equal to them in float32.
    rewards = torch.cat([torch.full((7,), 0.1), torch.arange(7.0)])
    got = group_advantages(rewards, 7, scale=scale, epsilon=1e-12, clip=None)
    assert got[:7].tolist() == [0.0] * 7
    assert got[7:].abs().min() < got[7:].abs().max()


def test_zero_variance_groups() -> None:
    rewards = torch.tensor([1.0, 1.0, 1.0, 2.0, NAN, 3.0, NAN, NAN])
    assert zero_variance_groups(rewards, 2).tolist() == [True, False, True, True]


def test_gdpo_weighs_normalised_rewards_and_leaves_unscored_samples_out_of_both_normalisations() -> None:
    """Against nested lists: the first sample of each group lacks one of the weighted rewards."""
    a, b = [[0.0, 1, 2, 5], [3.0, 1, 4, 8]], [[NAN, 0.0, 1, 0], [NAN, 2.0, 0, 1]]

    def normalised(group: list[float]) -> list[float]:
        mean = sum(group[1:]) / 3
        deviation = (sum((value - mean) ** 2 for value in group[1:]) / 2) ** 0.5
        return [(value - mean) / deviation for value in group]

    totals = [
        [x + 2 * y for x, y in zip(normalised(first), normalised(second), strict=True)]
        for first, second in zip(a, b, strict=True)
    ]
    centred = [[value - sum(group[1:]) / 3 for value in group] for group in totals]
    deviation = (sum(value**2 for group in centred for value in group[1:]) / 5) ** 0.5
    expected = [0.0 if value != value else value / deviation for group in centred for value in group]
    rewards = {"a": torch.tensor(a).flatten(), "b": torch.tensor(b).flatten(), "only_reported": torch.full((8,), NAN)}
    combined = gdpo_rewards(rewards, {"a": 1.0, "b": 2.0, "only_reported": 0.0}, 4, epsilon=1e-9)
    got = group_advantages(combined, 4, scale="batch_centred", epsilon=1e-9, clip=None)
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_a_ragged_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[N \* 4\] rewards"):
        group_advantages(torch.zeros(6), 4)


A, B = [0.0, 2, 5, 5], [1.0, 0, 0, 4]


@pytest.mark.parametrize(
    ("rewards", "weights", "normalise", "expected"),
    [
        # Within groups: a is -1, 1, 0, 0, and 2 b is 1, -1, -4, 4; their sum is 0, 0, -4, 4.
        ({"a": A, "b": B, "c": [1.0, 9, 4, 7]}, (1, 2, 0), False, {"a": 0.0, "b": 1.0}),
        # Their sum is -2, 2, 4, -4 with the squares' sum 40: a has 2 + 2, b the rest.
        ({"a": A, "b": [-value for value in B]}, (1, 2), False, {"a": 0.1, "b": 0.9}),
        ({"a": A, "b": [1000 * value for value in A]}, (3, 1), True, {"a": 0.75, "b": 0.25}),
        # A row that a reward leaves unscored does not count.
        ({"a": [0.0, 2, 1, 1, 1, NAN], "b": [0.0, 2, 1, 1, 1, 100]}, (1, 1), False, {"a": 0.5, "b": 0.5}),
        ({"a": [1.0, 1]}, (1,), False, {}),
    ],
)
def test_shares_of_the_variance_are_those_of_the_covariance(
    rewards: dict[str, list[float]], weights: tuple[float, ...], normalise: bool, expected: dict[str, float]
) -> None:
    tensors = {name: torch.tensor(values) for name, values in rewards.items()}
    weighted = dict(zip(rewards, weights, strict=True))
    assert variance_shares(tensors, weighted, 2, normalise=normalise, epsilon=1e-9) == pytest.approx(expected)


rewards_of_groups = st.integers(2, 6).flatmap(
    lambda size: st.lists(
        st.lists(st.floats(-100, 100, width=32) | st.just(math.nan), min_size=size, max_size=size),
        min_size=1,
        max_size=5,
    )
)
"""N groups of G rewards; NaN = unscored."""


def flat(groups: list[list[float]]) -> tuple[Tensor, int]:
    return torch.tensor(groups).reshape(-1), len(groups[0])


@given(groups=rewards_of_groups, scale=st.sampled_from(SCALES))
def test_advantages_are_finite_clipped_and_zero_where_nothing_was_scored(groups, scale) -> None:
    rewards, size = flat(groups)
    found = group_advantages(rewards, size, scale=scale, clip=5.0)
    assert found.isfinite().all()
    assert found.abs().max() <= 5.0
    assert (found[rewards.isnan()] == 0).all()
    constant = zero_variance_groups(rewards, size)
    assert (found.view(-1, size)[constant] == 0).all()


@given(groups=rewards_of_groups, scale=st.sampled_from(SCALES))
def test_a_better_sample_of_a_group_never_gets_less(groups, scale) -> None:
    rewards, size = flat(groups)
    found = group_advantages(rewards, size, scale=scale).view(-1, size)
    for own, given_ in zip(rewards.view(-1, size), found, strict=True):
        scored = ~own.isnan()
        order = own[scored].argsort(stable=True)
        assert (given_[scored][order].diff() >= 0).all()
