"""The flow policy of any model: which step is told what, and where its noise comes from."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.toy_flow import SlopeAdapter, ToyFlow
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import FlowConfig, PolicyConfig, SamplerConfig
from visual_grpo.models.flow.denoising import Denoiser
from visual_grpo.models.flow.flow_policy import FlowPolicy
from visual_grpo.models.flow.transitions import log_prob, noises
from visual_grpo.models.rows import START_NOISE, STEP_NOISE
from visual_grpo.models.tokens.probabilities import row_uniforms

RECORDS = [PromptRecord(id=str(i), prompt="x" * (i + 1)) for i in range(3)]
ROLLOUT = SamplerConfig(steps=4, guidance_scale=1.0)
EVERY_STEP = FlowConfig(window_steps=None)


def policy_with(**changes: Any) -> FlowPolicy[Tensor]:
    model = ToyFlow()
    return FlowPolicy(model, SlopeAdapter(model.transformer), ROLLOUT, PolicyConfig(**changes), kl_reference=True)


def rollout(policy: FlowPolicy[Tensor], group_size: int = 2) -> Any:
    return policy.rollout(RECORDS, group_size, torch.Generator().manual_seed(3))


def published(state: Tensor, velocity: Tensor, step: int, noise: float = 0.7) -> tuple[Tensor, float]:
    """Flow-GRPO, eq. 9, as it is printed; at sigma 1, where it has no value, with the next sigma's noise."""
    sigma, following = ToyFlow.sigmas[step : step + 2]
    scale = noise * math.sqrt(sigma / (1 - (following if sigma == 1 else sigma)))
    drift = velocity + scale**2 / (2 * sigma) * (state + (1 - sigma) * velocity)
    return state + drift * (following - sigma), scale * math.sqrt(sigma - following)


def test_several_draws_of_a_stochastic_step_are_refused() -> None:
    with pytest.raises(UserError, match=r"policy\.flow\.draws is 2, and a stochastic step has one noise"):
        policy_with(flow=FlowConfig(draws=2))


def test_every_step_is_the_published_transition_at_its_own_sigma() -> None:
    policy = policy_with(flow=EVERY_STEP)
    got = rollout(policy)
    trajectory, offsets = got.trajectory, torch.tensor([0.1, 0.1, 0.2, 0.2, 0.3, 0.3])
    assert trajectory.steps == (0, 1, 2)
    for step in range(3):
        state = trajectory.states[:, step]
        velocity = policy.model.transformer(state, offsets).detach()
        mean, std = published(state, velocity, step)
        torch.testing.assert_close(trajectory.means[:, step], mean, rtol=1e-5, atol=1e-5)
        want = log_prob(trajectory.next_states[:, step], mean, std)
        torch.testing.assert_close(got.log_probs[:, step], want, rtol=1e-4, atol=1e-3)
        without = published(state, offsets.view(-1, 1, 1, 1).expand_as(state), step)[0]
        torch.testing.assert_close(trajectory.reference_means[:, step], without, rtol=1e-5, atol=1e-5)
        if step:
            assert torch.equal(state, trajectory.next_states[:, step - 1])


@pytest.mark.parametrize("shared", [True, False])
def test_the_noise_of_a_step_is_standard_normal_and_not_the_start_noise(shared: bool) -> None:
    """One seed decides start and steps of a row where the start noise is not shared: two streams."""
    trajectory = rollout(policy_with(flow=EVERY_STEP, share_start_noise=shared)).trajectory
    start = trajectory.states[:, 0]
    stds = [published(start, start, step)[1] for step in range(3)]
    drawn = (trajectory.next_states - trajectory.means) / torch.tensor(stds).view(1, 3, 1, 1, 1)
    assert float(drawn.std()) == pytest.approx(1, abs=0.03)
    for row in range(6):
        streams = torch.stack([start[row], *drawn[row]]).flatten(1)
        correlations = torch.corrcoef(streams) - torch.eye(4)
        assert correlations.abs().max() < 0.2  # 768 numbers: one in a million is above .18
    assert torch.corrcoef(drawn.flatten(1)).fill_diagonal_(0).abs().max() < 0.15


def test_stochastic_generation_has_noise_of_its_own_too() -> None:
    denoiser = Denoiser(ToyFlow(), PolicyConfig(flow=EVERY_STEP))
    seeds, entries = [5, 6], torch.arange(2)
    path = denoiser.sample_path(torch.zeros(2), entries, seeds, seeds, steps=4, window=range(3))
    start = denoiser.start_noise(seeds)
    assert torch.equal(path.states[:, 0], start)
    drawn = path.next_states[:, 0] - path.means[:, 0]
    assert torch.corrcoef(torch.stack([start.flatten(), drawn.flatten()]))[0, 1].abs() < 0.12


def test_decodes_of_a_prompt_part_at_the_first_stochastic_step() -> None:
    policy = policy_with(flow=FlowConfig(window_start=1, window_steps=1))
    trajectory = rollout(policy, group_size=3).trajectory
    groups = trajectory.states[:, 0].view(3, 3, -1)
    assert torch.equal(groups[:, 0], groups[:, 2])
    assert len(trajectory.next_states[:, 0].flatten(1).unique(dim=0)) == 9


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5], [5, 0], [3]])
def test_a_replay_of_some_rows_is_the_rollouts(rows: list[int]) -> None:
    policy = policy_with(flow=EVERY_STEP, denoise_batch=2)
    got = rollout(policy)
    replayed = torch.cat([chunk.log_probs for chunk in policy.replay(got.trajectory, torch.tensor(rows))], 1)
    torch.testing.assert_close(replayed, got.log_probs[rows], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("start", "count"), [(0, 4), (2, 2), (3, 1), (None, 4), (None, 5), (3, None)], ids=lambda value: str(value)
)
def test_a_window_that_includes_the_last_step_is_refused(start: int | None, count: int | None) -> None:
    policy = policy_with(flow=FlowConfig(window_start=start, window_steps=count))
    with pytest.raises(UserError, match=r"policy\.flow's window of .* does not end before the last of 4"):
        rollout(policy)


@pytest.mark.parametrize(("start", "count"), [(0, 3), (2, 1), (1, None), (None, 3), (None, None)])
def test_a_window_up_to_the_last_but_one_is_not(start: int | None, count: int | None) -> None:
    steps = rollout(policy_with(flow=FlowConfig(window_start=start, window_steps=count))).trajectory.steps
    assert steps[-1] == 2
    assert steps == tuple(range(steps[0], 3))


def test_a_random_window_starts_at_any_step_that_leaves_it_whole() -> None:
    denoiser = policy_with(flow=FlowConfig(window_start=None, window_steps=2)).denoiser
    generator = torch.Generator().manual_seed(0)
    assert {tuple(denoiser.window(4, generator)) for _ in range(50)} == {(0, 1), (1, 2)}


ROWS = 2_000
LARGEST = 0.1
"""4.5 standard errors of a correlation of 2,000 pairs. With one stream for both it is .157: the normal generator takes
the size of some numbers from the very bits that some uniforms are made of."""


@pytest.mark.parametrize("stream", [START_NOISE, STEP_NOISE])
def test_tokens_and_noise_of_a_seed_are_independent(stream: int) -> None:
    seeds = torch.randint(2**62, (ROWS,), generator=torch.Generator().manual_seed(0)).tolist()
    uniforms = row_uniforms(seeds, 16).float()
    sizes = noises([seed ^ stream for seed in seeds], 1, (64,))[:, 0].square()
    assert torch.corrcoef(torch.cat([uniforms, sizes], 1).t())[:16, 16:].abs().max() < LARGEST


def test_a_replay_knows_how_far_each_step_has_moved() -> None:
    policy = policy_with(flow=EVERY_STEP)
    trajectory = rollout(policy).trajectory
    rows, offsets = torch.tensor([5, 0]), torch.tensor([0.3, 0.1])
    policy.model.transformer.slope.data += 0.05
    for step, chunk in enumerate(policy.replay(trajectory, rows)):
        state = trajectory.states[rows, step]
        mean, std = published(state, policy.model.transformer(state, offsets).detach(), step)
        ours = torch.distributions.Normal(mean, std)
        theirs = torch.distributions.Normal(trajectory.means[rows, step], std)
        want = torch.distributions.kl_divergence(ours, theirs).flatten(1).mean(1, keepdim=True)
        torch.testing.assert_close(chunk.divergence(), want, rtol=1e-4, atol=0)
