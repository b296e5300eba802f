"""Updates whose loss or gradient is not finite."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection
from typing import Any

import pytest
import torch

from tests.grpo.test_trainer import trainer_of
from tests.toys import ToyTokenPolicy, records
from visual_grpo.grpo.optimizer import MOST_IN_A_ROW, MOST_OVERFLOWS, NonFiniteLossError
from visual_grpo.grpo.signal_check import probe_gradient


class Broken(ToyTokenPolicy):
    """Its loss, or only the loss's gradient, is not finite at some updates (counted from 0)."""

    def __init__(self, at: Collection[int], of: str = "loss") -> None:
        super().__init__()
        self.at, self.of, self.count = at, of, 0

    def replay(self, trajectory: Any, rows: Any) -> Any:
        for chunk in super().replay(trajectory, rows):
            if self.count in self.at and self.of == "loss":
                chunk.log_probs.data[0] = math.nan
            elif self.count in self.at:
                chunk.log_probs.register_hook(lambda gradient: gradient * math.inf)
            self.count += 1
            yield chunk


@pytest.mark.parametrize("of", ["loss", "gradient"])
def test_by_default_the_first_one_stops_the_run(of: str) -> None:
    policy = Broken({1}, of)
    trainer = trainer_of(policy)
    steps = trainer.fit(records(10))
    next(steps)
    before = policy.table.detach().clone()
    what = "loss became nan" if of == "loss" else "gradient norm became (nan|inf)"
    with pytest.raises(NonFiniteLossError, match=rf"The {what} at step 2 with the prompts r\d.*grpo\.non_finite=skip"):
        next(steps)
    assert torch.equal(policy.table, before)


@pytest.mark.parametrize("of", ["loss", "gradient"])
def test_an_update_is_skipped_on_request(of: str, caplog: pytest.LogCaptureFixture) -> None:
    policy = Broken({1}, of)
    trainer = trainer_of(policy, non_finite="skip", steps=3)
    moments = []
    tables, found = [], []
    with caplog.at_level(logging.WARNING):
        for metrics in trainer.fit(records(10)):
            found.append(metrics.values)
            tables.append(policy.table.detach().clone())
            state = trainer.state()[0]
            moments.append({name: state[name].clone() for name in state if name.startswith("optimizer/")})
    assert [values["updates_skipped"] for values in found] == [0, 1, 0]
    assert math.isnan(found[1]["grad_norm"])
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[1], tables[2])
    assert tables[2].isfinite().all()
    assert len(moments[0]) == 3
    assert all(torch.equal(moments[1][name], value) for name, value in moments[0].items())
    [line] = caplog.messages
    assert "at step 2 with the prompts r" in line
    assert line.endswith("The update is skipped.")


def test_the_update_after_a_skipped_one_starts_from_the_policy_that_sampled() -> None:
    trainer = trainer_of(Broken({0}), non_finite="skip", updates_per_rollout=2, target_kl=1e-3, steps=1)
    (metrics,) = trainer.fit(records(10))
    assert metrics.values["updates_skipped"] == 1
    assert 0 < metrics.values["step_kl"] < 1


@pytest.mark.parametrize("resumed_after", [None, 4])
def test_a_model_that_stays_broken_stops_the_run_also_a_resumed_one(resumed_after: int | None) -> None:
    trainer = trainer_of(Broken(range(2, 99)), non_finite="skip", steps=20)
    steps = trainer.fit(records(10))
    while trainer.step < 2 + MOST_IN_A_ROW:
        next(steps)
        if trainer.step == resumed_after:
            tensors, facts = trainer.state()
            trainer = trainer_of(Broken(range(99)), non_finite="skip", steps=20)
            trainer.load_state(tensors, json.loads(json.dumps(facts)))
            steps = trainer.fit(records(10))
    with pytest.raises(NonFiniteLossError, match=r"at step 6 .* The 3 updates before it were skipped already\."):
        next(steps)


def test_skipped_updates_apart_from_each_other_do_not_add_up() -> None:
    trainer = trainer_of(Broken(set(range(0, 40, 2))), non_finite="skip", steps=20)
    assert sum(m.values["updates_skipped"] for m in trainer.fit(records(10))) == 10


def test_a_gradient_that_overflows_float16_at_every_scale_stops_the_run() -> None:
    finite = 1 + MOST_OVERFLOWS  # A scale that finds its size in time starts the count again.
    policy = Broken({*range(1, finite), *range(finite + 1, 999)}, "gradient")
    trainer = trainer_of(policy, dtype="float16", steps=100)
    rates: list[float] = []
    with pytest.raises(NonFiniteLossError, match=r"not finite in 25 updates in a row, at step 51 .*model\.dtype"):
        rates.extend(m.values["learning_rate"] for m in trainer.fit(records(10)))
    assert [step for step, rate in enumerate(rates) if rate] == [0, finite], "the others changed nothing"
    assert trainer.step == 2 * finite
    assert policy.table.isfinite().all()


class Narrow(ToyTokenPolicy):
    """A gradient as large as float16's largest number becomes infinite, as in half precision."""

    def replay(self, trajectory: Any, rows: Any) -> Any:
        for chunk in super().replay(trajectory, rows):
            chunk.log_probs.register_hook(lambda gradient: torch.where(gradient.abs() < 100, gradient, math.inf))
            yield chunk


def test_the_signal_checks_gradient_does_not_overflow_and_is_that_of_single_precision() -> None:
    gradients = []
    for policy, dtype in ((ToyTokenPolicy(), "float32"), (Narrow(), "float16")):
        trainer = trainer_of(policy, dtype=dtype)
        before = trainer.optimizer.scaler.state_dict()
        gradients.append(probe_gradient(trainer, records(4), torch.Generator().manual_seed(3)))
        assert trainer.optimizer.scaler.state_dict() == before
        next(trainer.fit(records(10)))
    exact, scaled = gradients
    assert exact.any()
    assert torch.allclose(scaled, exact, rtol=1e-6, atol=0)
