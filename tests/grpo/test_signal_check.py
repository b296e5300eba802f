from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.grpo.test_trainer import trainer_of
from tests.toys import CountingScorer, ToyGaussianPolicy, ToyTokenPolicy, one_reward, records
from visual_grpo.common.types import PromptRecord, Scores
from visual_grpo.grpo.signal_check import (
    NoSignalError,
    Signal,
    check_signal,
    measure_signal,
    update_cosines,
    useful_cosine,
)
from visual_grpo.grpo.trainer import GRPOTrainer


def blind(prompts: Sequence[PromptRecord], samples: Sequence[Any]) -> Scores:
    """A reward that does not depend on the samples."""
    seed = int(torch.stack(list(samples)).sum())
    return one_reward(torch.rand(len(samples), generator=torch.Generator().manual_seed(seed)))


def table_of(scorer: Any) -> GRPOTrainer[Any]:
    return trainer_of(ToyTokenPolicy(steps=12, vocabulary=8), scorer, group_size=32)


@pytest.mark.parametrize("steps", [4, 80])
def test_a_reward_that_sees_passes_and_one_that_does_not_is_refused_after_all_rollouts(steps: int) -> None:
    def measured(scorer: Any) -> Signal:
        trainer = table_of(scorer)
        before = trainer.state()[0]
        found = measure_signal(trainer, records(10), most=48, useful=useful_cosine(steps))
        after = trainer.state()[0]
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert trainer.parameters[0].grad is None
        return found

    seeing, not_seeing = measured(CountingScorer()), measured(blind)
    assert seeing.cosine > 0.15
    assert abs(not_seeing.cosine) < 0.03
    assert seeing.samples == 4 * 32
    assert seeing.rollouts < not_seeing.rollouts == 48
    check_signal({"ar": seeing}, useful_cosine(steps), {})
    said = r"(?s)module 'dit'.*above 0 by two.*measured: .* in 48 rollouts of 128 samples.*What to change: more noise\."
    with pytest.raises(NoSignalError, match=said):
        check_signal(
            {"ar": seeing, "dit": not_seeing}, useful_cosine(steps), {"ar": "other tokens", "dit": "more noise"}
        )


@pytest.mark.parametrize(
    ("scorer", "most", "drawn"), [(CountingScorer(), 3, 3), (CountingScorer(), 20, 6), (blind, 20, 20)]
)
def test_rollouts_are_drawn_until_they_can_tell_or_no_more_are_allowed(scorer: Any, most: int, drawn: int) -> None:
    assert measure_signal(table_of(scorer), records(10), most=most, useful=0.01).rollouts == drawn


def test_at_the_useful_cosine_half_of_the_sum_of_all_updates_is_common() -> None:
    for steps in (40, 360):
        c = useful_cosine(steps)
        assert steps * c / (1 + (steps - 1) * c) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("cosine", "error", "rollouts", "steps", "verdict"),
    [
        (0.181, 0.009, 48, 4, "passed"),  # A short run learns little from it; its gradients agree all the same.
        (0.02, 0.012, 48, 4, "refused"),
        (0.04, 0.03, 48, 4, "unclear"),  # .05 would not have been seen.
        (0.001, 0.004, 48, 80, "refused"),
        (0.001, 0.0065, 48, 80, "unclear"),  # 1 / 81 would not have been seen.
        (0.008, 0.0035, 128, 360, "passed"),  # The negative points, in as many rollouts as it took to see them,
        (0.008, 0.016, 4, 360, "unclear"),  # and in the 4 of conf/negative_points.
        (0.008, 0.0001, 4, 400, "passed"),
        (0.0, 0.0001, 3, 400, "unclear"),  # conf/glm_image: an error of 3 rollouts may be small by chance.
        (0.0, 0.0, 3, 80, "unclear"),  # One rollout of three has a gradient.
    ],
)
def test_a_run_is_refused_only_where_a_useful_cosine_would_have_been_seen(
    cosine: float, error: float, rollouts: int, steps: int, verdict: str
) -> None:
    signal = Signal(cosine=cosine, error=error, rollouts=rollouts, samples=64)
    assert signal.verdict(useful_cosine(steps)) == verdict
    if verdict == "refused":
        with pytest.raises(NoSignalError):
            check_signal({"ar": signal}, useful_cosine(steps), {})
    else:
        said = check_signal({"ar": signal}, useful_cosine(steps), {})
        assert ("too few to tell for ar" in said) == (verdict == "unclear")


def test_where_no_gradient_is_there_is_no_agreement() -> None:
    gradients = torch.tensor([[1.0, 0.0, 2.0], [2.0, 0.0, 4.0], [0.0, 0.0, 0.0]])
    expected = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(update_cosines(gradients), expected)


@pytest.mark.parametrize(("most", "drawn"), [(3, 3), (48, 6)])
def test_a_constant_reward_is_refused_at_any_number_of_rollouts(most: int, drawn: int) -> None:
    batches = []

    def constant(prompts: Sequence[PromptRecord], samples: Sequence[Any]) -> Scores:
        batches.append(torch.stack(list(samples)))
        return one_reward(torch.ones(len(samples)))

    policy = ToyGaussianPolicy()
    policy.table.data += 0.5  # Away from its reference, so that the KL has a gradient.
    trainer = trainer_of(policy, constant, group_size=4, kl_weight=0.1)
    found = measure_signal(trainer, records(10), most=most, useful=useful_cosine(80))
    assert (found.cosine, found.error, found.rollouts) == (0, 0, drawn)
    with pytest.raises(NoSignalError, match="Every gradient was exactly 0: all samples of a prompt got the same"):
        check_signal({"dit": found}, useful_cosine(80), {})
    next(iter(trainer.fit(records(10))))
    assert len(torch.stack(batches).unique(dim=0)) == drawn + 1, "the training's samples are others"
