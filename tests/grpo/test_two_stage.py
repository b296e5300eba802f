from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.toys import CountingScorer, ToyGaussianPolicy, ToyTokenPolicy, records
from visual_grpo.config import GRPOConfig, SignalCheckConfig
from visual_grpo.grpo.metrics import reproducible
from visual_grpo.grpo.signal_check import (
    NoSignalError,
    Signal,
    check_signal,
    describe,
    least_cosine,
    mean_of_pairs,
    measure_signal,
    update_cosines,
)
from visual_grpo.grpo.trainer import GRPOTrainer
from visual_grpo.grpo.two_stage import AlternatingTrainer, JointTrainer, averaged, reweighted
from visual_grpo.types import JointRollout, PromptRecord, Rollout, Scores

STEPS = 3


def config(group_size: int, **changes: Any) -> GRPOConfig:
    base: dict[str, Any] = {"steps": STEPS, "prompts_per_step": 4, "learning_rate": 0.05}
    return GRPOConfig(**(base | {"group_size": group_size} | changes))


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
        self, prompts: Sequence[PromptRecord], outer_size: int, inner_size: int, generator: torch.Generator
    ) -> JointRollout:
        if inner_size == 1:
            return JointRollout(outer=self.outer.rollout(prompts, outer_size, generator), inner=None)
        if outer_size == 1:
            return JointRollout(outer=None, inner=self.inner.rollout(prompts, inner_size, generator))
        outer = self.outer.rollout(prompts, outer_size, generator)
        inner = self.inner.rollout(outer.prompts, inner_size, generator)
        twos = (outer.trajectory == 2).float().mean(1).repeat_interleave(inner_size)
        inner = Rollout(**{**vars(inner), "samples": list(inner.trajectory + twos[:, None])})
        self.seen.append(JointRollout(outer=outer, inner=inner))
        return self.seen[-1]


def joint(policy: ToyJointPolicy, sizes: tuple[int, int], scorer: Any, weights: Any, **changes: Any) -> JointTrainer:
    def trainer(own: Any, name: str, size: int) -> GRPOTrainer[Any] | None:
        return GRPOTrainer(own, scorer, config(size, **changes), seed=5, module=name) if size > 1 else None

    return JointTrainer(
        policy,
        ("outer", trainer(policy.outer, "outer", sizes[0])),
        ("inner", trainer(policy.inner, "inner", sizes[1])),
        scorer,
        weights,
        steps=STEPS,
        prompts_per_step=4,
        sizes=sizes,
        seed=5,
    )


BOTH = {"outer": {"count": 1.0}, "inner": {"count": 1.0}}


@pytest.mark.parametrize(("sizes", "single"), [((6, 1), "outer"), ((1, 6), "inner")])
def test_with_one_sample_of_a_stage_it_is_the_other_stages_own_training(sizes: tuple[int, int], single: str) -> None:
    policy = ToyJointPolicy()
    both = list(joint(policy, sizes, CountingScorer(), BOTH).fit(records(10)))
    alone: Any = ToyTokenPolicy() if single == "outer" else ToyGaussianPolicy()
    trainer = GRPOTrainer(alone, CountingScorer(), config(6), seed=5)
    metrics = list(trainer.fit(records(10)))
    trained, untouched = (policy.outer, policy.inner) if single == "outer" else (policy.inner, policy.outer)
    assert torch.equal(trained.table, alone.table)
    assert not untouched.table.any()
    assert [reproducible(m.values) for m in both] == [reproducible(m.values) for m in metrics]


def test_the_outer_stage_is_compared_by_the_mean_of_its_decodes_and_the_inner_within_one() -> None:
    """The first step's gradients by hand, each module under its own reward."""
    policy, weights = ToyJointPolicy(), {"outer": {"mean": 1.0}, "inner": {"first": 1.0}}
    trainer = joint(policy, (3, 4), Judge(), weights, loss="dr_grpo", max_grad_norm=1e9)
    next(trainer.fit(records(10)))
    (seen,) = policy.seen
    assert seen.outer is not None
    assert seen.inner is not None
    samples = torch.stack(list(seen.inner.samples))
    mean = samples.mean(1).view(4, 3, 4).mean(2)
    outer_advantage = (mean - mean.mean(1, keepdim=True)).flatten()
    first = -(samples[:, 0] - 1).abs().view(12, 4)
    inner_advantage = (first - first.mean(1, keepdim=True)).flatten()
    for own, rollout, advantage, plain in (
        (policy.outer, seen.outer, outer_advantage, ToyTokenPolicy()),
        (policy.inner, seen.inner, inner_advantage, ToyGaussianPolicy()),
    ):
        rows = torch.arange(len(rollout.samples))
        log_probs = torch.cat([chunk.log_probs for chunk in plain.replay(rollout.trajectory, rows)], 1)
        objective = (log_probs * advantage[:, None] * rollout.mask).sum() / rollout.mask.numel()
        (want,) = torch.autograd.grad(-objective, [plain.table])
        assert own.table.grad is not None
        torch.testing.assert_close(own.table.grad, want, rtol=1e-4, atol=1e-6)


def test_a_joint_run_learns_both_stages() -> None:
    policy = ToyJointPolicy()
    trainer = joint(policy, (4, 3), Judge(), {"outer": {"mean": 1.0}, "inner": {"mean": 1.0}})
    trainer.steps = 40
    metrics = list(trainer.fit(records(10)))
    assert (policy.inner.table > 0.3).all()
    assert (policy.outer.table.softmax(-1)[:2, 2] > 0.5).all()  # the later half of odd rows does not count
    assert metrics[0].values["samples"] == 4 * 4 * 3
    assert {"outer/kl", "inner/kl", "reward/total", "outer/reward/mean"} <= metrics[0].values.keys()
    assert metrics[-1].step == 40


def alternating(seed: int = 5) -> AlternatingTrainer:
    trainers: dict[str, GRPOTrainer[Any]] = {
        "outer": GRPOTrainer(ToyTokenPolicy(), CountingScorer(), config(4), seed=seed),
        "inner": GRPOTrainer(ToyGaussianPolicy(), CountingScorer(), config(6), seed=seed),
    }
    return AlternatingTrainer(trainers, STEPS, seed)


def test_an_alternating_step_is_one_of_each_module() -> None:
    trainer = alternating()
    metrics = list(trainer.fit(records(10)))
    assert [m.step for m in metrics] == [1, 2, 3]
    assert metrics[0].values["samples"] == 4 * 4 + 4 * 6
    alone = GRPOTrainer(ToyGaussianPolicy(), CountingScorer(), config(6), seed=5)
    list(alone.fit(records(10)))
    assert torch.equal(trainer.modules["inner"].parameters[0], alone.parameters[0])


@pytest.mark.parametrize("kind", ["alternating", "joint"])
def test_a_run_goes_on_bit_for_bit(kind: str) -> None:
    def make() -> Any:
        return alternating() if kind == "alternating" else joint(ToyJointPolicy(), (3, 3), Judge(), JUDGED)

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


def blind(prompts: Sequence[PromptRecord], samples: Sequence[Any]) -> Scores:
    """A reward that does not depend on the samples."""
    total = torch.rand(len(samples), generator=torch.Generator().manual_seed(int(torch.stack(list(samples)).sum())))
    return Scores(total=total, rewards={"blind": total}, parts={}, weights={"blind": 1.0})


def test_the_signal_check_tells_a_reward_that_sees_from_one_that_does_not() -> None:
    def measured(scorer: Any) -> Signal:
        trainer = GRPOTrainer(ToyTokenPolicy(steps=12, vocabulary=8), scorer, config(32), seed=3)
        before = trainer.state()[0]
        found = measure_signal(trainer, records(10), most=48, least=0.1)
        after = trainer.state()[0]
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert trainer.parameters[0].grad is None
        return found

    seeing, not_seeing = measured(CountingScorer()), measured(blind)
    assert seeing.cosine > 0.15
    assert abs(not_seeing.cosine) < 0.03
    assert seeing.samples == 4 * 32
    assert seeing.rollouts < not_seeing.rollouts == 48
    check_signal({"ar": seeing}, 0.1)
    said = r"(?s)module 'dit'.*at least 0.1.*measured: .* in 48 rollouts of 128 samples.*flow.noise"
    with pytest.raises(NoSignalError, match=said):
        check_signal({"ar": seeing, "dit": not_seeing}, 0.1)


def test_rollouts_are_drawn_until_they_can_tell() -> None:
    def measured(most: int, least: float) -> tuple[Signal, list[int]]:
        trainer = GRPOTrainer(ToyTokenPolicy(steps=12, vocabulary=8), CountingScorer(), config(32), seed=3)
        looks: list[int] = []
        found = measure_signal(
            trainer, records(10), most=most, least=least, unclear=lambda signal: looks.append(signal.rollouts)
        )
        return found, looks

    few, looks = measured(most=3, least=0.1)
    assert (few.rollouts, looks) == (3, [])
    early, looks = measured(most=20, least=-1.0)
    assert (early.rollouts, looks) == (6, [])
    late, looks = measured(most=20, least=1.0)
    assert (late.rollouts, looks) == (20, [6, 12])
    assert late.error < early.error / 2


def test_a_few_rollouts_that_disagree_by_chance_do_not_stop_a_run() -> None:
    check_signal({"ar": Signal(cosine=0.01, error=0.05, rollouts=4, samples=64)}, 0.03)
    with pytest.raises(NoSignalError):
        check_signal({"ar": Signal(cosine=0.01, error=0.005, rollouts=4, samples=64)}, 0.03)


def test_one_wild_element_neither_hides_what_gradients_share_nor_feigns_it() -> None:
    generator = torch.Generator().manual_seed(0)
    shared, noise = torch.randn(1, 1000, generator=generator).sign(), torch.randn(16, 1000, generator=generator)
    wild, sizes = 1000 * torch.tensor([1.0, -1.0]).repeat(8)[:, None], 10 ** torch.randn(1, 1000, generator=generator)

    def mean(gradients: torch.Tensor) -> float:
        return mean_of_pairs(update_cosines(torch.cat([wild, sizes * gradients], dim=1)))[0]

    assert mean(0.5 * shared + noise) == pytest.approx(0.2, abs=0.03)  # .5 ** 2 / (.5 ** 2 + 1)
    assert mean(noise) == pytest.approx(0, abs=0.01)


def test_where_no_gradient_is_there_is_no_agreement() -> None:
    gradients = torch.tensor([[1.0, 0.0, 2.0], [2.0, 0.0, 4.0], [0.0, 0.0, 0.0]])
    expected = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(update_cosines(gradients), expected)


def test_at_the_least_cosine_half_of_all_steps_sum_is_signal() -> None:
    steps, width = 60, 20_000
    generator = torch.Generator().manual_seed(0)
    common = torch.nn.functional.normalize(torch.randn(width, generator=generator), dim=0)
    noise = torch.nn.functional.normalize(torch.randn(steps, width, generator=generator))
    cosine = least_cosine(SignalCheckConfig(), steps)
    total = (math.sqrt(cosine) * common + math.sqrt(1 - cosine) * noise).sum(0)
    share = float(total @ common) ** 2 / float(total @ total)
    assert share == pytest.approx(0.5, abs=0.02)
    assert least_cosine(SignalCheckConfig(least_cosine=0.3), steps) == 0.3


def test_what_too_few_rollouts_cannot_tell_is_said() -> None:
    sure = Signal(cosine=0.09, error=0.05, rollouts=4, samples=64)
    high, low = replace(sure, cosine=0.07), replace(sure, cosine=-0.06)
    assert describe({"ar": sure}, 0.03) == "ar 0.090 +- 0.050 in 4 rollouts"
    shown = "ar 0.090 +- 0.050 in 4 rollouts, dit {} +- 0.050 in 4 rollouts"
    advice = " (too few to tell for dit: raise policy.signal_check.rollouts)"
    assert describe({"ar": sure, "dit": high}, 0.03) == shown.format("0.070") + advice
    assert describe({"ar": sure, "dit": low}, 0.03) == shown.format("-0.060") + advice
    assert describe({"ar": sure, "dit": replace(sure, cosine=-0.08)}, 0.03) == shown.format("-0.080")


def test_the_error_of_the_mean_of_pairs_is_the_jackknifes() -> None:
    vectors = torch.nn.functional.normalize(torch.randn(5, 3, generator=torch.Generator().manual_seed(0)))
    cosines = vectors @ vectors.t()

    def mean(rows: list[int]) -> float:
        pairs = [float(cosines[i, j]) for i in rows for j in rows if i < j]
        return sum(pairs) / len(pairs)

    left_out = [mean([i for i in range(5) if i != row]) for row in range(5)]
    center = sum(left_out) / 5
    error = math.sqrt(4 / 5 * sum((value - center) ** 2 for value in left_out))
    assert mean_of_pairs(cosines) == pytest.approx((mean(list(range(5))), error), abs=1e-6)


def test_a_constant_reward_has_no_signal() -> None:
    def constant(prompts: Sequence[PromptRecord], samples: Sequence[Any]) -> Scores:
        total = torch.ones(len(samples))
        return Scores(total=total, rewards={"one": total}, parts={}, weights={"one": 1.0})

    trainer = GRPOTrainer(ToyGaussianPolicy(), constant, config(4), seed=3)
    found = measure_signal(trainer, records(10), most=48, least=0.1)
    assert (found.cosine, found.error, found.rollouts) == (0, 0, 6)
    with pytest.raises(NoSignalError):
        check_signal({"dit": found}, 0.1)
