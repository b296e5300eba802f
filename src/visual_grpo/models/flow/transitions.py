"""Denoising steps as decisions: Gaussian transitions with the marginals of the deterministic flow.

A rectified flow has x = (1 - s) x0 + s x1 with noise x1 at sigma s, and the model's velocity is v = x1 - x0. An
ODE step ``x + (s' - s) v`` has no likelihood. Two stochastic steps have one, and leave the marginals as they are:

| sampler | mean | standard deviation | source |
|---|---|---|---|
| sde | x (1 + c^2 / (2 s) dt) + v (1 + c^2 (1 - s) / (2 s)) dt, c = a sqrt(s / (1 - s)) | c sqrt(-dt) | Flow-GRPO, arXiv 2505.05470 eq. 9 |
| cps | (1 - s') x0 + sqrt(s'^2 - std^2) x1 | s' sin(a pi / 2) | coefficients-preserving sampling, arXiv 2509.05952 |

Here dt = s' - s < 0 and a is the noise level; with a -> 0 both become the ODE step. Shapes: states, velocities, means and
noises are [B, C, h, w] float32; log-probs and KLs are [B].
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from visual_grpo.common.decisions import GaussianLikelihoods

Sampler = Literal["sde", "cps"]


def ode_step(velocity: Tensor, state: Tensor, sigma: float, next_sigma: float) -> Tensor:
    """The flow's Euler step from ``sigma`` down to ``next_sigma``."""
    return state + (next_sigma - sigma) * velocity


def transition(
    velocity: Tensor, state: Tensor, sigma: float, next_sigma: float, noise: float, sampler: Sampler
) -> tuple[Tensor, float]:
    """Mean [B, C, h, w] and standard deviation of the state at ``next_sigma``.

    Raises ValueError where the standard deviation would be 0, as at the last step of ``cps``: such a step
    is not a decision.
    """
    mean, std = _TRANSITIONS[sampler](velocity, state, sigma, next_sigma, noise)
    if not std > 0:
        raise ValueError(
            f"a {sampler} step from sigma {sigma:g} to {next_sigma:g} with noise {noise:g} has no variance"
        )
    return mean, std


def log_prob(sample: Tensor, mean: Tensor, std: float) -> Tensor:
    """[B] log-density of ``sample`` under N(mean, std^2), summed over its D elements and divided by sqrt(D).

    A sum over elements makes ratios that explode with the resolution, a mean ratios that need clips of 1e-4. The
    log-ratio of two near policies is a sum of D like terms with a spread of sqrt(D): in this unit a clip of 0.2 means
    what it means for a token.
    """
    elements = sample[0].numel()
    normalised = (sample.detach() - mean) / std
    density = -0.5 * normalised.square() - math.log(std) - 0.5 * math.log(2 * math.pi)
    return density.flatten(1).sum(1) / math.sqrt(elements)


def transition_kl(mean: Tensor, reference_mean: Tensor, std: float) -> Tensor:
    """[B] KL(N(mean, std^2) || N(reference_mean, std^2)), nats an element: mean((m - m_ref)^2) / (2 std^2)."""
    return (mean - reference_mean).square().flatten(1).mean(1) / (2 * std**2)


def step_likelihoods(
    column: int, std: float, mean: Tensor, old_mean: Tensor, sample: Tensor, reference_mean: Tensor | None
) -> GaussianLikelihoods:
    """Offers the steps of b rows in ``column``; means under the present policy, the old one and the reference."""
    return GaussianLikelihoods(
        steps=slice(column, column + 1),
        log_probs=log_prob(sample, mean, std)[:, None].cpu(),
        kl=None if reference_mean is None else transition_kl(mean, reference_mean, std)[:, None].cpu(),
        divergence=lambda: transition_kl(mean.detach(), old_mean, std)[:, None].cpu(),
    )


def _sde(velocity: Tensor, state: Tensor, sigma: float, next_sigma: float, noise: float) -> tuple[Tensor, float]:
    # At sigma 1 the diffusion is singular: the next sigma stands in for it, as in Flow-GRPO. Schedulers round: in
    # float32, the first sigma of a shift of 1.18 is 1 - 6e-8.
    diffusion = noise * math.sqrt(sigma / (1 - (sigma if 1 - sigma > 1e-5 else next_sigma)))
    dt = next_sigma - sigma
    half = diffusion**2 / (2 * sigma)
    mean = state * (1 + half * dt) + velocity * ((1 + half * (1 - sigma)) * dt)
    return mean, diffusion * math.sqrt(-dt)


def _cps(velocity: Tensor, state: Tensor, sigma: float, next_sigma: float, noise: float) -> tuple[Tensor, float]:
    std = next_sigma * math.sin(noise * math.pi / 2)
    clean, pure = state - sigma * velocity, state + (1 - sigma) * velocity
    mean = (1 - next_sigma) * clean + math.sqrt(next_sigma**2 - std**2) * pure
    return mean, std


_TRANSITIONS = {"sde": _sde, "cps": _cps}


def noises(seeds: Sequence[int], steps: int, shape: tuple[int, ...]) -> Tensor:
    """[B, steps, *shape] standard normal; row i is a function of ``seeds[i]`` alone."""
    rows = [torch.randn(steps, *shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(rows)
