"""The ratio compares with the replay's log-probs where the sampler computes the same policy with another rounding."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.grpo.test_trainer import config, trained, trainer_of
from tests.grpo.test_update import batch
from tests.toys import ToyGaussianPolicy, ToyTokenPolicy, records
from visual_grpo.common.decisions import Likelihoods
from visual_grpo.common.types import PromptRecord, Rollout, Share
from visual_grpo.grpo.policy_loss import PolicyLoss
from visual_grpo.grpo.ratio_check import MAX_FACTOR, MEAN_FACTOR, TOLERANCES, RatioCheckError, check_ratio

GAP = 0.02


class Rounded:
    """The sampler is off by +-GAP, as in half precision."""

    def rollout(
        self, prompts: Sequence[PromptRecord], group_size: int, generator: torch.Generator, share: Share | None = None
    ) -> Rollout[Any]:
        rollout = super().rollout(prompts, group_size, generator, share)  # type: ignore[misc]
        signs = (torch.arange(rollout.log_probs.numel()) % 2 * 2 - 1).view(rollout.log_probs.shape)
        return replace(rollout, log_probs=rollout.log_probs + GAP * signs)


class RoundedTokens(Rounded, ToyTokenPolicy):
    pass


class RoundedSteps(Rounded, ToyGaussianPolicy):
    pass


HALF: dict[str, Any] = {"dtype": "bfloat16", "updates_per_rollout": 2}


@pytest.mark.parametrize("kind", [RoundedTokens, RoundedSteps])
@pytest.mark.parametrize("micro_batch_size", [None, 5])
def test_the_first_ratio_is_exactly_one_and_the_gap_is_reported(kind: Any, micro_batch_size: int | None) -> None:
    for step in trained(kind(), micro_batch_size=micro_batch_size, **HALF)[1]:
        assert step.values["ratio/first_max_abs_log"] == 0
        assert step.values["update_1/ratio"] == 1
        assert step.values["update_2/ratio"] != 1
        assert step.values["sampler_gap/mean"] == pytest.approx(GAP, rel=1e-4)
        assert step.values["sampler_gap/max"] == pytest.approx(GAP, rel=1e-4)


@pytest.mark.parametrize(("exact", "rounded"), [(ToyTokenPolicy, RoundedTokens), (ToyGaussianPolicy, RoundedSteps)])
def test_what_the_sampler_measured_changes_nothing(exact: Any, rounded: Any) -> None:
    tables = [trained(kind(), micro_batch_size=5, **HALF)[0].table for kind in (exact, rounded)]
    assert torch.equal(*tables)
    assert tables[0].abs().max() > 0.05


@pytest.mark.parametrize(
    ("chosen", "dtype", "replays"),
    [
        *(("auto", dtype, dtype != "float32") for dtype in TOLERANCES),
        ("replay", "float32", True),
        ("sampler", "bfloat16", False),
    ],
)
def test_where_the_ratio_compares_with_the_replay(chosen: str, dtype: str, replays: bool) -> None:
    assert config(old_log_probs=chosen).replays(dtype) == replays
    trainer = trainer_of(RoundedTokens(), dtype=dtype, old_log_probs=chosen, ratio_tolerance=0.1)
    first = next(trainer.fit(records(10)))
    assert ("sampler_gap/mean" in first.values) == replays
    assert (first.values["ratio/first_max_abs_log"] == 0) == replays


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_replay_at_another_temperature_is_caught_before_the_first_update(dtype: str) -> None:
    policy = ToyTokenPolicy(replay_temperature=0.3)
    policy.table.data.copy_(torch.linspace(0, 1, 20).view(4, 5))
    before = policy.table.detach().clone()
    with pytest.raises(RatioCheckError, match=r"measured: max 0\.\d+[^$]*temperature"):
        trained(policy, dtype=dtype)
    assert torch.equal(policy.table, before)


def test_an_update_that_is_left_out_leaves_the_next_one_the_first() -> None:
    class Once(RoundedTokens):
        failed = False

        def replay(self, trajectory: Any, rows: torch.Tensor) -> Any:
            for chunk in super().replay(trajectory, rows):
                bad, self.failed = not self.failed, True
                yield replace(chunk, log_probs=chunk.log_probs * (torch.nan if bad else 1.0))

    _, (step, *_) = trained(Once(), non_finite="skip", ratio_tolerance=1.0, **HALF)
    assert step.values["updates_skipped"] == 1
    assert step.values["update_2/ratio"] == 1


def test_truncated_importance_weights_scale_the_loss_by_hand() -> None:
    sampled = torch.tensor([[-1.0, -2.0], [-1.0, -3.0]])
    replayed = torch.tensor([[-1.5, -1.0], [-1.0, -1.0]])
    total = torch.tensor([1.0, -2.0])
    own = batch(sampled, torch.ones(2, 2, dtype=torch.bool), total, old=replayed)
    policy_loss = PolicyLoss(config(loss="dapo", old_log_probs="replay", sampler_correction=2.0), [own])
    new = replayed.clone().requires_grad_()
    chunk = Likelihoods(steps=slice(0, 2), log_probs=new)
    loss, *_ = policy_loss(own.compared(chunk, own.rows), own, own.rows)
    loss.backward()
    weights = torch.tensor([[0.6065307, 2.0], [1.0, 2.0]])  # exp(-0.5), e cut to 2, 1, e^2 cut to 2
    assert new.grad is not None
    torch.testing.assert_close(new.grad, -weights * total[:, None] / 4)


FLOOR, ROUNDING = TOLERANCES["bfloat16"][0], 0.055


@pytest.mark.parametrize(
    ("mean", "largest", "rounding", "tolerance", "passes"),
    [
        (1.5 * FLOOR, 0.5, 0.0, None, False),
        (1.5 * FLOOR, 0.5, ROUNDING, None, True),  # A deep model may round more,
        (0.9 * FLOOR, 0.5, ROUNDING / 10, None, False),  # and a shallow one less.
        (1.01 * MEAN_FACTOR * ROUNDING, 0.5, ROUNDING, None, False),
        (0.05, 1.01 * MAX_FACTOR * ROUNDING, ROUNDING, None, False),
        (0.05, 0.2, ROUNDING, 0.1, False),
    ],
)
def test_what_the_ratio_check_lets_pass(
    mean: float, largest: float, rounding: float, tolerance: float | None, passes: bool
) -> None:
    with nullcontext() if passes else pytest.raises(RatioCheckError):
        check_ratio(mean, largest, "bfloat16", rounding, tolerance)
