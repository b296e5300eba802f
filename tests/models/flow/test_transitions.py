from __future__ import annotations

import math
from itertools import pairwise
from typing import get_args

import pytest
import torch
from torch.distributions import Independent, Normal, kl_divergence

from visual_grpo.models.flow.transitions import (
    Sampler,
    log_prob,
    noises,
    ode_step,
    transition,
    transition_kl,
)
from visual_grpo.starter.glm_image import modules

SHAPE = (5, 4, 6, 8)
SAMPLERS = get_args(Sampler)


def drawn(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_keeps_the_distribution_of_the_flow(sampler: Sampler) -> None:
    """With a single image x0 the velocity is (x - x0) / s, and x is N((1 - s) x0, s^2) at every sigma s."""
    x0, mean, variance = 1.5, 0.05 * 1.5, 0.95**2
    states = torch.tensor([1.0, 0.0], dtype=torch.float64).view(2, 1, 1, 1)
    for sigma, next_sigma in pairwise(torch.linspace(0.95, 0.1, 1001, dtype=torch.float64).tolist()):
        (one, zero), std = transition((states - x0) / sigma, states, sigma, next_sigma, 0.7, sampler)
        slope, offset = float(one - zero), float(zero)
        mean, variance = slope * mean + offset, slope**2 * variance + std**2
    assert mean == pytest.approx(0.9 * x0, rel=0.01)
    assert variance == pytest.approx(0.1**2, rel=0.05)


def test_log_prob_and_kl_are_those_of_torch() -> None:
    mean, other, sample, std = drawn(1), drawn(2), drawn(3), 0.37
    ours = Independent(Normal(mean, std), 3)
    elements = math.prod(SHAPE[1:])
    torch.testing.assert_close(log_prob(sample, mean, std), ours.log_prob(sample) / math.sqrt(elements))
    kl = kl_divergence(ours, Independent(Normal(other, std), 3)) / elements
    torch.testing.assert_close(transition_kl(mean, other, std), kl)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_without_noise_it_is_the_pipelines_own_scheduler_step(sampler: Sampler) -> None:
    scheduler = modules.build_scheduler()
    scheduler.set_timesteps(5, mu=0.4)
    sigmas = scheduler.sigmas.tolist()
    state = drawn(1)
    for step, timestep in enumerate(scheduler.timesteps):
        velocity = drawn(10 + step)
        want = scheduler.step(velocity, timestep, state, return_dict=False)[0]
        torch.testing.assert_close(ode_step(velocity, state, sigmas[step], sigmas[step + 1]), want)
        if step < 4:  # the last step of cps has no variance at any noise
            mean, std = transition(velocity, state, sigmas[step], sigmas[step + 1], 1e-5, sampler)
            assert 0 < std < 1e-4
            torch.testing.assert_close(mean, want, rtol=1e-4, atol=1e-4)
        state = want


@pytest.mark.parametrize(
    ("sampler", "sigma", "following", "mean", "std"),
    [
        # sde: c^2 = .49 s / (1 - s); mean = 2 (1 - c^2 dt / (2 s)) + 1 (1 + c^2 (1 - s) / (2 s)) dt, dt = s - s'.
        ("sde", 1.0, 0.9, 1.61, 0.7),  # s' stands in for s in 1 - s: c^2 = 4.9
        ("sde", 0.99999994, 0.9, 1.61, 0.7),  # 1, rounded
        ("sde", 0.8, 0.6, 1.759, 0.6260990),  # c^2 = 1.96
        ("sde", 0.5, 0.2, 2.0795, 0.3834058),  # c^2 = .49
        ("sde", 0.1, 0.0, 2.0700556, 0.0737865),  # c^2 = .0544444
        # cps: clean 2.8, 2.5, 2.1 and pure 1.8, 1.5, 1.1, weighed with 1 - s' and s' cos(.35 pi).
        ("cps", 0.8, 0.6, 1.6103097, 0.5346039),
        ("cps", 0.5, 0.2, 2.1361971, 0.1782013),
        ("cps", 0.1, 0.05, 2.0199695, 0.0445503),
    ],
)
def test_transitions_by_hand(sampler: Sampler, sigma: float, following: float, mean: float, std: float) -> None:
    """State 2, velocity -1, noise .7."""
    got = transition(torch.full((1, 1, 1, 1), -1.0), torch.full((1, 1, 1, 1), 2.0), sigma, following, 0.7, sampler)
    assert got[0].item() == pytest.approx(mean, abs=1e-5)
    assert got[1] == pytest.approx(std, abs=1e-6)


def test_a_step_without_variance_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cps step from sigma 0.3 to 0 with noise 0.7 has no variance"):
        transition(drawn(1), drawn(2), 0.3, 0.0, 0.7, "cps")


def test_noise_of_a_row_is_its_own() -> None:
    together, alone = noises([5, 6, 7], 2, (4, 3, 3)), noises([6], 2, (4, 3, 3))
    assert torch.equal(together[1], alone[0])
    assert not torch.equal(together[0], together[1])
    assert not torch.equal(together[0, 0], together[0, 1])
