"""The anchor: its pictures, its loss and its gradient by formulas in float64, and that it changes nothing else."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.flow.test_forward_process import Contrast
from tests.models.flow.test_policy import RECORDS, ROLLOUT
from tests.models.toy_flow import SlopeAdapter, ToyFlow
from tests.toys import given_gradients
from visual_grpo.common.types import Scores
from visual_grpo.config import FlowConfig, GRPOConfig, PolicyConfig
from visual_grpo.grpo.signal_check import measure_signal
from visual_grpo.grpo.trainer import GRPOTrainer
from visual_grpo.models.flow.anchor import draw_anchor
from visual_grpo.models.flow.policy import FlowPolicy
from visual_grpo.models.rows import random_seeds

SLOPE = -0.4
OFFSETS = torch.tensor([0.1, 0.2, 0.3]).view(-1, 1, 1, 1).double()
WEIGHT = 0.7
MATCHING: dict[str, Any] = {"likelihood": "matching"}


def policy_with(*, anchor: bool = True, **flow: Any) -> FlowPolicy[Tensor]:
    model = ToyFlow()
    config = PolicyConfig(
        flow=FlowConfig(window_steps=2, **flow), share_start_noise=flow.get("likelihood") != "matching"
    )
    return FlowPolicy(model, SlopeAdapter(model.transformer), ROLLOUT, config, anchor=anchor)


def rollout(policy: FlowPolicy[Tensor]) -> Any:
    return policy.rollout(RECORDS, 2, torch.Generator().manual_seed(3))


def squared_errors(anchor: Any, slope: Any, column: int) -> Tensor:
    """[N], of the trained velocity to the base model's, whose slope is 0."""
    return ((slope * anchor.states[:, column].double()) ** 2).flatten(1).mean(1)


@pytest.mark.parametrize("flow", [{}, MATCHING])
def test_the_pictures_are_the_base_models_and_noised_at_levels_of_the_schedule(flow: Any) -> None:
    anchor = rollout(policy_with(**flow)).trajectory.anchor
    start = policy_with().denoiser.start_noise(random_seeds(3, torch.Generator().manual_seed(3))).double()
    pictures = start
    for sigma, following in pairwise(ToyFlow.sigmas):
        pictures = pictures + (following - sigma) * OFFSETS  # Without the adapter the slope is 0.
    levels = torch.tensor(anchor.timesteps).double().view(1, 2, 1, 1, 1) / 1000
    noise = (anchor.states - (1 - levels) * pictures[:, None]) / levels
    streams = torch.cat([noise.flatten(2).flatten(0, 1), start.flatten(1)])
    assert torch.corrcoef(streams).fill_diagonal_(0).abs().max() < 0.2
    assert float(noise.std()) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("flow", [{}, MATCHING])
def test_it_does_not_move_the_base_model(flow: Any) -> None:
    policy = policy_with(**flow)
    policy.model.transformer.slope.data.zero_()
    (metrics,) = trainer_of(policy, Equal()).fit(RECORDS)
    assert metrics.values["penalty"] == metrics.values["grad_norm"] == 0


@pytest.mark.parametrize(("count", "parts"), [(2, [{1000, 800}, {500, 200}]), (4, [{1000}, {800}, {500}, {200}])])
def test_the_levels_are_drawn_from_equal_parts_of_the_schedule(count: int, parts: list[set[float]]) -> None:
    policy, found = policy_with(), []
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        found.append(draw_anchor(policy.denoiser, policy.adapter, torch.zeros(1), [5], 4, count, generator).timesteps)
    assert [set(levels) for levels in zip(*found, strict=True)] == parts


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5], [5, 0, 4]])
@pytest.mark.parametrize("flow", [{}, MATCHING, MATCHING | {"norm_penalty": 0.3}])
def test_the_loss_of_a_row_is_that_of_its_prompts_picture(rows: list[int], flow: Any) -> None:
    with_anchor, without = policy_with(**flow), policy_with(anchor=False, **flow)
    got, plain = rollout(with_anchor), rollout(without)
    assert plain.trajectory.anchor is None
    assert all(map(torch.equal, got.samples, plain.samples)), "the anchor is drawn after them"
    assert torch.equal(got.log_probs, plain.log_probs)
    chosen = torch.tensor(rows)
    pairs = zip(*(p.replay(r.trajectory, chosen) for p, r in ((with_anchor, got), (without, plain))), strict=True)
    for column, (chunk, other) in enumerate(pairs):
        want = squared_errors(got.trajectory.anchor, SLOPE, column)[chosen // 2, None]
        assert other.anchor is None
        torch.testing.assert_close(chunk.anchor().double(), want, rtol=1e-4, atol=1e-5, check_stride=False)
        assert len(chunk.penalties) == len(other.penalties)
        torch.testing.assert_close(chunk.log_probs, other.log_probs, rtol=0, atol=0)


class Equal:
    def __call__(self, prompts: Any, samples: Any) -> Scores:
        total = torch.ones(len(samples))
        return Scores(total=total, rewards={"equal": total}, parts={}, weights={"equal": 1.0})


def trainer_of(policy: Any, scorer: Any, **changes: Any) -> GRPOTrainer[Any]:
    settings: dict[str, Any] = {"steps": 1, "prompts_per_step": 3, "group_size": 4, "learning_rate": 0.05}
    settings["anchor_weight"] = WEIGHT
    return GRPOTrainer(policy, scorer, GRPOConfig(**(settings | changes)))


@pytest.mark.parametrize("size", [None, 4, 3, 1])
def test_the_gradient_is_that_of_the_mean_over_prompts_and_levels_whatever_the_micro_batch(size: int | None) -> None:
    policy = policy_with()
    kept: list[Any] = []
    draw = policy.decode
    policy.decode = lambda *a, **k: kept.append(draw(*a, **k)) or kept[-1]  # type: ignore[func-returns-value,method-assign]
    trainer = trainer_of(policy, Equal(), micro_batch_size=size)
    with given_gradients() as gradients:
        (metrics,) = trainer.fit(RECORDS)
    anchor = kept[0].trajectory.anchor
    slope = torch.tensor(SLOPE, dtype=torch.float64, requires_grad=True)
    errors = torch.stack([squared_errors(anchor, slope, column) for column in range(2)]).mean()
    (want,) = torch.autograd.grad(WEIGHT * errors, [slope])
    norm = want.abs().clamp(min=1.0)  # The trainer clips at 1.
    torch.testing.assert_close(gradients[0].double(), want / norm, rtol=1e-4, atol=1e-6)
    assert metrics.values["penalty"] == pytest.approx(WEIGHT * float(errors.detach()), rel=1e-4)


def test_it_is_computed_only_where_a_loss_adds_it() -> None:
    policy, calls = policy_with(), list[Any]()
    got = rollout(policy)
    policy.model.transformer.register_forward_hook(lambda *arguments: calls.append(arguments))
    chunks = list(policy.replay(got.trajectory, torch.arange(6)))
    assert len(calls) == len(chunks) == 2
    assert chunks[0].anchor is not None
    chunks[0].anchor()
    assert len(calls) == 3


def test_the_signal_check_does_not_take_the_anchor_for_a_reward() -> None:
    signal = measure_signal(trainer_of(policy_with(), Equal()), RECORDS, most=6, useful=0.05, note=lambda line: None)
    assert signal.vanished


@pytest.mark.parametrize("flow", [{}, MATCHING])
def test_it_keeps_the_policy_near_the_base_model(flow: Any) -> None:
    """Where the slope is 0."""
    ends = []
    for weight in (0.0, 100.0):
        policy = policy_with(**flow)
        list(trainer_of(policy, Contrast(), steps=12, anchor_weight=weight).fit(RECORDS))
        ends.append(abs(float(policy.model.transformer.slope.detach())))
    assert ends[0] > 0.6
    assert ends[1] < 0.3
