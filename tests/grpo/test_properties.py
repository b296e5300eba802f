"""What holds for any rewards, masks and log-probs, not only for those that somebody thought of."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from visual_grpo.grpo import losses
from visual_grpo.grpo.losses import Scale, group_advantages, zero_variance_groups

SCALES: list[Scale] = ["group", "batch", "batch_centred", "none"]
EPSILON, CLIP = 1e-4, 5.0
rewards_of_groups = st.integers(2, 6).flatmap(
    lambda size: st.lists(
        st.lists(st.floats(-100, 100, width=32) | st.just(math.nan), min_size=size, max_size=size),
        min_size=1,
        max_size=5,
    )
)
"""N groups of G rewards; NaN = unscored."""
ratios = st.floats(0, 50, width=32)
advantages = st.floats(-5, 5, width=32)


def flat(groups: list[list[float]]) -> tuple[Tensor, int]:
    return torch.tensor(groups).reshape(-1), len(groups[0])


@given(groups=rewards_of_groups, scale=st.sampled_from(SCALES))
def test_advantages_are_finite_clipped_and_zero_where_nothing_was_scored(groups, scale) -> None:
    rewards, size = flat(groups)
    found = group_advantages(rewards, size, scale=scale, epsilon=EPSILON, clip=CLIP)
    assert found.isfinite().all()
    assert found.abs().max() <= CLIP
    assert (found[rewards.isnan()] == 0).all()
    constant = zero_variance_groups(rewards, size)
    assert (found.view(-1, size)[constant] == 0).all()


@given(groups=rewards_of_groups, scale=st.sampled_from(SCALES))
def test_unclipped_advantages_of_a_group_sum_to_zero(groups, scale) -> None:
    rewards, size = flat(groups)
    found = group_advantages(rewards, size, scale=scale, epsilon=EPSILON, clip=None).view(-1, size)
    assert (found.sum(1).abs() <= 1e-3 * (1 + found.abs().max())).all()


@given(groups=rewards_of_groups, scale=st.sampled_from(SCALES))
def test_a_better_sample_of_a_group_never_gets_less(groups, scale) -> None:
    rewards, size = flat(groups)
    found = group_advantages(rewards, size, scale=scale).view(-1, size)
    for own, given_ in zip(rewards.view(-1, size), found, strict=True):
        scored = ~own.isnan()
        order = own[scored].argsort(stable=True)
        assert (given_[scored][order].diff() >= 0).all()


@given(groups=rewards_of_groups, shift=st.integers(-64, 64), seed=st.integers(0, 9))
def test_advantages_know_neither_the_level_of_a_prompt_nor_the_order_of_its_samples(groups, shift, seed) -> None:
    rewards, size = flat(groups)
    found = group_advantages(rewards, size)
    # A spread much above the rounding of a float32 of this size: below it, a shift may merge what differed.
    spread = rewards.view(-1, size).nan_to_num(0).std(1)
    clear = (spread > 0.1)[:, None].expand(-1, size).reshape(-1)
    shifted = group_advantages(rewards + shift, size)
    assert torch.allclose(found[clear], shifted[clear], atol=1e-2)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    permuted = group_advantages(rewards.view(-1, size)[:, order].reshape(-1), size)
    assert torch.allclose(permuted.view(-1, size), found.view(-1, size)[:, order], atol=1e-4)


@given(log_ratio=st.floats(-1e4, 1e4, width=32))
def test_k3_is_finite_and_never_negative_and_neither_is_any_ratio(log_ratio) -> None:
    value = torch.tensor([[log_ratio]])
    assert losses.k3(value).isfinite().all()
    assert losses.k3(value).item() >= -torch.finfo(torch.float32).eps  # exp rounds; the two differences are exact.
    ratio = losses.importance_ratio(value, torch.zeros(1, 1))
    assert ratio.isfinite().all()
    assert ratio.item() >= 0


masks = st.integers(1, 5).flatmap(
    lambda steps: st.lists(st.lists(st.booleans(), min_size=steps, max_size=steps), min_size=1, max_size=6)
)


def weights_of(mask: Tensor, rows: Tensor, aggregation: losses.Aggregation) -> Tensor:
    return losses.step_weights(
        mask[rows],
        aggregation,
        counted_rows=int(mask.any(1).sum()),
        counted_steps=int(mask.sum()),
        rows=len(mask),
    )


@given(mask=masks, size=st.integers(1, 4), aggregation=st.sampled_from(["row_mean", "step_mean", "constant"]))
def test_weights_are_of_counted_steps_only_and_do_not_depend_on_micro_batches(mask, size, aggregation) -> None:
    counted = torch.tensor(mask)
    whole = weights_of(counted, torch.arange(len(counted)), aggregation)
    parts = [weights_of(counted, rows, aggregation) for rows in torch.arange(len(counted)).split(size)]
    assert torch.equal(torch.cat(parts), whole)
    assert (whole[~counted] == 0).all()
    assert (whole[counted] > 0).all()
    if aggregation != "constant" and counted.any():
        assert whole.sum().item() == pytest.approx(1, rel=1e-5)
    if aggregation == "constant":
        assert whole.sum().item() == pytest.approx(counted.float().mean().item(), rel=1e-5)


@given(mask=masks, seed=st.integers(0, 99))
def test_a_sequences_ratio_sees_counted_steps_only(mask, seed) -> None:
    counted = torch.tensor(mask)
    generator = torch.Generator().manual_seed(seed)
    new, old = torch.randn(counted.shape, generator=generator), torch.randn(counted.shape, generator=generator)
    changed = torch.where(counted, new, 77.0)
    ratio = losses.sequence_ratio(new, old, counted)
    assert torch.equal(ratio, losses.sequence_ratio(changed, old, counted))
    assert torch.allclose(ratio, ratio[:, :1].expand_as(ratio))
    logs = [(new - old)[row][counted[row]] for row in range(len(counted))]
    expected = [math.exp(own.mean().item()) if len(own) else 1.0 for own in logs]
    assert ratio[:, 0].tolist() == pytest.approx(expected, rel=1e-4)
