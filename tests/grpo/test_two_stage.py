from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.grpo.test_trainer import config
from tests.toys import CountingScorer, ToyGaussianPolicy, ToyTokenPolicy, given_gradients, records
from visual_grpo.common.types import JointRollout, PromptRecord, Rollout, Scores, Share
from visual_grpo.grpo.trainer import GRPOTrainer
from visual_grpo.grpo.two_stage import AlternatingTrainer, JointTrainer, averaged, reweighted

STEPS = 3


class Judge:
    """Two rewards of a decode: its mean, and how near its first step is to 1."""

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[torch.Tensor]) -> Scores:
        stacked = torch.stack(list(samples)).float()
        rewards = {"mean": stacked.mean(1), "first": -(stacked[:, 0] - 1).abs()}
        return reweighted(Scores(total=rewards["mean"], rewards=rewards, parts={}, weights={}), {"mean": 1.0})


class ToyJointPolicy:
    """Tokens, then Gaussian steps; a decode's sample is the steps plus the number of its 2s."""

    def __init__(self) -> None:
        self.outer, self.inner = ToyTokenPolicy(), ToyGaussianPolicy()
        self.seen: list[JointRollout] = []

    def joint_rollout(
        self,
        prompts: Sequence[PromptRecord],
        outer_size: int,
        inner_size: int,
        generator: torch.Generator,
        share: Share | None = None,
    ) -> JointRollout:
        outer = self.outer.rollout(prompts, outer_size, generator)
        inner = self.inner.rollout(outer.prompts, inner_size, generator)
        twos = (outer.trajectory == 2).float().mean(1).repeat_interleave(inner_size)
        inner = Rollout(**{**vars(inner), "samples": list(inner.trajectory + twos[:, None])})
        self.seen.append(JointRollout(outer=outer, inner=inner))
        return self.seen[-1]


def joint(policy: ToyJointPolicy, sizes: tuple[int, int], weights: Any, **changes: Any) -> JointTrainer:
    scorer = Judge()
    outer, inner = (config(group_size=size, **changes) for size in sizes)
    trainers: dict[str, GRPOTrainer[Any]] = {
        "outer": GRPOTrainer(policy.outer, scorer, outer, seed=5, module="outer"),
        "inner": GRPOTrainer(policy.inner, scorer, inner, seed=5, module="inner"),
    }
    return JointTrainer(policy, trainers, scorer, weights, steps=STEPS, prompts_per_step=4, seed=5)


def test_the_outer_stage_is_compared_by_the_mean_of_its_decodes_and_the_inner_within_one() -> None:
    """The first step's gradients by hand, each module under its own reward."""
    policy, weights = ToyJointPolicy(), {"outer": {"mean": 1.0}, "inner": {"first": 1.0}}
    trainer = joint(policy, (3, 4), weights, loss="dr_grpo", max_grad_norm=1e9)
    with given_gradients() as given:
        metrics = next(trainer.fit(records(10)))
    (seen,) = policy.seen
    assert metrics.values["samples"] == 4 * 3 * 4
    assert {"outer/kl", "inner/kl", "reward/total", "outer/reward/mean"} <= metrics.values.keys()
    samples = torch.stack(list(seen.inner.samples))
    mean = samples.mean(1).view(4, 3, 4).mean(2)
    outer_advantage = (mean - mean.mean(1, keepdim=True)).flatten()
    first = -(samples[:, 0] - 1).abs().view(12, 4)
    inner_advantage = (first - first.mean(1, keepdim=True)).flatten()
    for got, rollout, advantage, plain in (
        (given[0], seen.outer, outer_advantage, ToyTokenPolicy()),
        (given[1], seen.inner, inner_advantage, ToyGaussianPolicy()),
    ):
        rows = torch.arange(len(rollout.samples))
        log_probs = torch.cat([chunk.log_probs for chunk in plain.replay(rollout.trajectory, rows)], 1)
        objective = (log_probs * advantage[:, None] * rollout.mask).sum() / rollout.mask.numel()
        (want,) = torch.autograd.grad(-objective, [plain.table])
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_a_joint_training_goes_on_with_the_prompts_that_come_next() -> None:
    weights = {"outer": {"mean": 1.0}, "inner": {"first": 1.0}}
    whole, first, rest = (joint(ToyJointPolicy(), (2, 2), weights) for _ in range(3))
    shown = [[prompt.id for prompt in step.prompts] for step in whole.fit(records(10))]
    next(first.fit(records(10)))
    rest.load_state(*first.state())
    assert [[prompt.id for prompt in step.prompts] for step in rest.fit(records(10))] == shown[1:]


def alternating() -> AlternatingTrainer:
    trainers: dict[str, GRPOTrainer[Any]] = {
        "outer": GRPOTrainer(ToyTokenPolicy(), CountingScorer(), config(group_size=4), seed=5),
        "inner": GRPOTrainer(ToyGaussianPolicy(), CountingScorer(), config(), seed=5),
    }
    return AlternatingTrainer(trainers, STEPS, seed=5)


def test_an_alternating_step_is_one_of_each_module() -> None:
    trainer = alternating()
    metrics = list(trainer.fit(records(10)))
    assert [m.step for m in metrics] == [1, 2, 3]
    assert metrics[0].values["samples"] == 4 * 4 + 4 * 6
    alone = GRPOTrainer(ToyGaussianPolicy(), CountingScorer(), config(), seed=5)
    list(alone.fit(records(10)))
    assert torch.equal(trainer.modules["inner"].parameters[0], alone.parameters[0])


@pytest.mark.parametrize("kind", ["alternating", "joint"])
def test_a_run_goes_on_bit_for_bit(kind: str) -> None:
    def make() -> Any:
        return alternating() if kind == "alternating" else joint(ToyJointPolicy(), (3, 3), JUDGED)

    whole, first, second = make(), make(), make()
    list(whole.fit(records(10)))
    next(first.fit(records(10)))
    second.load_state(*first.state())
    rest = list(second.fit(records(10)))
    assert [m.step for m in rest] == [2, 3]
    for name, trainer in whole.modules.items():
        assert torch.equal(trainer.parameters[0], second.modules[name].parameters[0])


JUDGED = {"outer": {"mean": 1.0}, "inner": {"mean": 1.0}}


def test_means_leave_the_unscored_out() -> None:
    values = torch.tensor([1.0, math.nan, 3.0, 5.0, math.nan, math.nan])
    scores = Scores(total=values, rewards={"a": values}, parts={"a/b": values}, weights={"a": 1.0})
    for got in (averaged(scores, 2).total, averaged(scores, 2).rewards["a"], averaged(scores, 2).parts["a/b"]):
        assert got[:2].tolist() == [1.0, 4.0]
        assert got[2].isnan()
    assert reweighted(scores, {"a": 0.5}).total[3] == 2.5
    ratio = replace(scores, ratios={"a/r": (values, 2 * values)})
    above, below = averaged(reweighted(ratio, {"a": 0.5}), 2).ratios["a/r"]
    assert (above[:2].tolist(), below[:2].tolist()) == ([1.0, 4.0], [2.0, 8.0])
    only_reported = Scores(total=values, rewards={"a": values, "b": torch.ones(6)}, parts={}, weights={})
    assert reweighted(only_reported, {"a": 0.0, "b": 2.0}).total.tolist() == [2.0] * 6


class Partial:
    """Scores the decodes of each prompt alike; of the first, one reward is lacking."""

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[torch.Tensor]) -> Scores:
        a, b = [1.0, 0.0, 0.6, 0.6], [math.nan, 0.0, 0.6, 0.6]
        rewards = {"a": torch.tensor(a).repeat(len(samples) // 4), "b": torch.tensor(b).repeat(len(samples) // 4)}
        return reweighted(Scores(total=rewards["a"], rewards=rewards, parts={}, weights={}), {"a": 1.0, "b": 1.0})


@pytest.mark.parametrize(("b", "total", "a"), [(1.0, (0.0 + 1.2) / 2, (0.0 + 0.6) / 2), (0.0, 0.55, 0.55)])
def test_a_decode_that_lacks_a_reward_of_the_module_counts_for_none_of_them(b: float, total: float, a: float) -> None:
    trainer = joint(ToyJointPolicy(), (2, 2), {"outer": {"a": 1.0, "b": b}, "inner": {"a": 1.0, "b": 1.0}})
    trainer.scorer = Partial()
    values = next(trainer.fit(records(10))).values
    assert (values["outer/reward/total"], values["outer/reward/a"]) == pytest.approx((total, a))
