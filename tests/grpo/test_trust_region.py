"""The target KL: whatever the learning rate, a step moves the policy by about as much."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.grpo.test_trainer import trainer_of
from tests.toys import CountingScorer, ToyGaussianPolicy, ToyTokenPolicy, records
from visual_grpo.common.decisions import GaussianLikelihoods
from visual_grpo.common.errors import UserError
from visual_grpo.grpo.trust_region import LARGEST_SCALE, TrustRegion

TARGET = 0.01
DTYPES = "bfloat16", "float32"


def moves(policy: Any, **options: Any) -> tuple[list[float], list[dict[str, Any]]]:
    """The KL of each step, in nats a decision, by the distributions themselves, and the metrics of the steps."""
    tables, found = [policy.table.detach().clone()], []
    for metrics in trainer_of(policy, **options).fit(records(10)):
        tables.append(policy.table.detach().clone())
        found.append(dict(metrics.values))
    return [kl(policy, *pair) for pair in itertools.pairwise(tables)], found


def kl(policy: Any, before: Tensor, after: Tensor) -> float:
    if isinstance(policy, ToyGaussianPolicy):
        return float(((after - before) ** 2 / 2).mean())
    old = before.log_softmax(-1)
    return float((old.exp() * (old - after.log_softmax(-1))).sum(-1).mean())


@pytest.mark.parametrize(("rate", "updates"), [(0.05, 1), (2.0, 3), (200.0, 1)])
@pytest.mark.parametrize("policy", [ToyGaussianPolicy, ToyTokenPolicy])
def test_a_step_moves_the_policy_by_about_the_target(policy: Any, rate: float, updates: int) -> None:
    moved, metrics = moves(
        policy(), steps=11, learning_rate=rate, target_kl=TARGET, updates_per_rollout=updates, prompts_per_step=8
    )
    exact = policy is ToyGaussianPolicy
    assert max(moved) < (1.01 if exact else 1.5) * TARGET  # The KL of tokens is estimated.
    assert min(moved[7:11]) > (0.95 if exact else 0.6) * TARGET  # Later the tokens are learned.
    if exact:
        assert [step["step_kl"] for step in metrics] == pytest.approx(moved, rel=1e-3)


def test_the_schedule_has_its_way() -> None:
    options: dict[str, Any] = {"steps": 40, "learning_rate": 2.0, "target_kl": TARGET}
    moved, _ = moves(ToyGaussianPolicy(), schedule="linear", **options)
    for step in (0, 10, 20, 30, 39):
        assert moved[step] <= 1.02 * TARGET * (1 - step / 40) ** 2
    assert moved[39] < 0.002 * TARGET


def test_the_learning_rate_that_is_reported_is_the_one_that_was_used() -> None:
    """Without the target, that learning rate makes the same step."""
    held, free = ToyGaussianPolicy(), ToyGaussianPolicy()
    (found,) = trainer_of(held, steps=1, learning_rate=3.0, target_kl=TARGET).fit(records(10))
    used = found.values["learning_rate"]
    assert used < 0.3
    list(trainer_of(free, steps=1, learning_rate=used).fit(records(10)))
    torch.testing.assert_close(held.table, free.table)
    steps = trainer_of(ToyGaussianPolicy(), steps=9, learning_rate=0.01, target_kl=TARGET).fit(records(10))
    rates = [step.values["learning_rate"] for step in steps]
    assert rates[:4] == pytest.approx([0.01 * 1.5**n for n in range(4)])
    assert max(rates) <= 0.01 * LARGEST_SCALE


def test_a_large_step_is_measured_again_until_it_is_near() -> None:
    """The KL saturates, as of a policy that has collapsed: its square root says too little."""
    weight = nn.Parameter(torch.tensor([0.0]))
    region, asked = TrustRegion([weight], TARGET), list[float]()

    def measure() -> float:
        distance = float(weight.detach())
        asked.append(math.nan if distance > 500 else 1 - math.exp(-(distance**2)))
        return asked[-1]

    region.begin(measure)
    weight.data.fill_(1000.0)
    left = region.hold(1.0)
    assert math.isnan(asked[0])
    assert len(asked) == 5
    assert float(weight.detach()) == pytest.approx(1000 * left, rel=1e-5)
    assert 0.5 * TARGET < 1 - math.exp(-(float(weight.detach()) ** 2)) < 1.2 * TARGET
    assert region.scale == left


def test_a_target_that_no_step_reaches_is_refused_with_the_largest_movement() -> None:
    trainer = trainer_of(ToyGaussianPolicy(), steps=30, learning_rate=1e-4, target_kl=TARGET, warmup_steps=2)
    with pytest.raises(
        UserError,
        match=r"target_kl is 0\.01, but 12 updates moved the policy by at most [1-9]\S*e-05 times what they should,"
        r" the last with 10 times"
        r" grpo\.learning_rate \(0\.0001\)\. Set target_kl to what can be reached",
    ):
        list(trainer.fit(records(10)))


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 4, "updates_per_rollout": 16, "learning_rate": 0.01},
        {"steps": 20, "schedule": "linear", "learning_rate": 0.016},
    ],
)
def test_a_run_is_not_refused_whose_updates_reach_their_own_parts_of_the_target(options: Any) -> None:
    moved, metrics = moves(ToyGaussianPolicy(), target_kl=TARGET, **options)
    assert len(moved) == options["steps"]
    assert metrics[0]["learning_rate"] != metrics[-1]["learning_rate"]


class Counting(ToyGaussianPolicy):
    """Notes the rows of every replay without gradient, as which the movement is measured."""

    def __init__(self) -> None:
        super().__init__()
        self.measured: list[list[int]] = []

    def replay(self, trajectory: Tensor, rows: Tensor) -> Iterator[GaussianLikelihoods]:
        if not torch.is_grad_enabled():
            self.measured.append(rows.tolist())
        yield from super().replay(trajectory, rows)


@pytest.mark.parametrize(
    ("size", "want"), [(None, [[0, 7, 12, 18]]), (1, [[0], [7], [12], [18]]), (3, [[0, 7, 12], [18]])]
)
def test_the_movement_is_measured_on_one_scored_sample_of_each_prompt(size: int | None, want: Any) -> None:
    policy = Counting()
    scorer = CountingScorer(unscored=(6, 14, 15))
    options: dict[str, Any] = {"micro_batch_size": size, "prompts_per_step": 4, "group_size": 6, "target_kl": TARGET}
    list(trainer_of(policy, scorer, steps=1, learning_rate=0.01, **options).fit(records(10)))
    assert policy.measured == want


def test_an_update_that_stays_too_long_is_named(caplog: pytest.LogCaptureFixture) -> None:
    region = TrustRegion([nn.Parameter(torch.ones(1))], TARGET)
    region.begin(lambda: 1.0)
    region.hold(1.0)
    assert "An update may exceed target_kl (0.01): it was still too long 8 times" in caplog.text


def test_a_later_update_that_goes_too_far_shortens_the_whole_step() -> None:
    weight = nn.Parameter(torch.tensor([0.0]))
    region = TrustRegion([weight], TARGET)
    region.begin(lambda: float(weight.detach()) ** 2)
    weight.data.fill_(0.05)
    assert region.hold(0.5) == pytest.approx(1)
    weight.data.fill_(0.125)
    left = region.hold(1.0)
    assert (left, float(weight.detach()), region.scale) == pytest.approx((0.8, 0.1, 0.8))


def test_rounding_above_the_target_is_refused_before_the_first_update_only() -> None:
    region = TrustRegion([nn.Parameter(torch.ones(1))], TARGET, rounds=True)
    with pytest.raises(UserError, match=r"rounding alone moves the policy by 0\.02 from .*Raise target_kl"):
        region.begin(lambda: 2 * TARGET)
    region.hold(1.0)
    region.begin(lambda: 2 * TARGET)


@pytest.mark.parametrize("noise", [0.13, 0.5])
def test_the_noise_of_a_sampler_in_half_precision_is_no_movement(noise: float) -> None:
    """Whose log-probs the first update replaces by the replay's."""

    class Noisy(ToyTokenPolicy):
        def rollout(self, *arguments: Any, **options: Any) -> Any:
            rollout = super().rollout(*arguments, **options)
            draws = torch.randn(rollout.log_probs.shape, generator=torch.Generator().manual_seed(1))
            return replace(rollout, log_probs=rollout.log_probs + noise * draws)

    options: dict[str, Any] = {"steps": 8, "learning_rate": 2.0, "target_kl": TARGET, "prompts_per_step": 8}
    moved, metrics = moves(Noisy(), dtype="bfloat16", ratio_tolerance=9.0, **options)
    assert 0.5 * TARGET < max(moved) < 1.5 * TARGET
    assert max(step["step_kl"] for step in metrics) == pytest.approx(TARGET, rel=0.1)


def test_rounding_of_denoising_steps_is_subtracted_in_half_precision_only() -> None:
    class Rounding(ToyGaussianPolicy):
        def _moved(self, chosen: slice, rows: int) -> Tensor:
            return super()._moved(chosen, rows) + 0.5 * TARGET

    found = [moves(Rounding(), steps=4, learning_rate=2.0, target_kl=TARGET, dtype=dtype)[0] for dtype in DTYPES]
    assert max(found[0]) == pytest.approx(TARGET, rel=0.02)
    assert max(found[1]) < 0.9 * TARGET


def test_updates_without_a_gradient_neither_change_the_scale_nor_end_the_run() -> None:
    trainer = trainer_of(ToyTokenPolicy(), CountingScorer(target=99), steps=14, target_kl=TARGET)
    assert len(list(trainer.fit(records(10)))) == 14
    assert trainer.optimizer.trust_region is not None
    assert trainer.optimizer.trust_region.scale == 1


@pytest.mark.parametrize("target", [None, TARGET])
def test_a_resumed_run_goes_on_with_the_scale_bit_for_bit(target: float | None) -> None:
    options: dict[str, Any] = {"steps": 6, "learning_rate": 1.0, "target_kl": target, "updates_per_rollout": 2}
    whole, first, rest = (trainer_of(ToyTokenPolicy(), **options) for _ in range(3))
    want = list(whole.fit(records(10)))
    steps = first.fit(records(10))
    for _ in range(3):
        next(steps)
    tensors, metadata = first.state()
    assert ("trust_region" in metadata) == (target is not None), "off, it leaves no trace"
    rest.load_state(tensors, metadata)
    got = list(rest.fit(records(10)))
    assert torch.equal(whole.state()[0]["adapter/table"], rest.state()[0]["adapter/table"])
    assert [step.values["learning_rate"] for step in got] == [step.values["learning_rate"] for step in want[3:]]
    assert whole.state()[1] == rest.state()[1]
