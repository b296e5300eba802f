"""Forward-process training: how well the model matches a sample stands for the sample's log-probability.

The ODE generates a sample x0. Noise e at the noise level s gives the state x = (1 - s) x0 + s e, whose velocity
is u = e - x0. The log-probability of this decision is that of u under N(v, 1/2), where v is the model's velocity of x:
``-|v - u|^2`` up to a constant, the negative loss of flow matching. Old and new policy share the noise. So ratio, KL
and divergence are computed as for a stochastic step with the mean v, and `policy.FlowPolicy` trains the model so.

Sources: advantage weighted matching, arXiv 2509.25050; the comparison of likelihoods in arXiv 2602.04663; what the
velocity's norm tells, NormGuard, arXiv 2606.27771. Shapes: as in denoising.py, with K noises for each row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from visual_grpo.common.phases import phase
from visual_grpo.config import PolicyConfig
from visual_grpo.models.flow.denoising import DenoisedPath, Denoiser
from visual_grpo.models.flow.interface import FlowModel, Schedule
from visual_grpo.models.flow.transitions import noises
from visual_grpo.models.offload import on_device
from visual_grpo.models.rows import STEP_NOISE

C = TypeVar("C")
STD = math.sqrt(0.5)
"""Deviation of u around v, so that the squared error has the weight 1 of flow matching at every noise level."""


def denoiser_of(model: FlowModel[C], config: PolicyConfig) -> Denoiser[C]:
    """Returns what generates and replays training samples under the likelihood ``policy.flow.likelihood``."""
    return MatchingDenoiser(model, config) if config.flow.likelihood == "matching" else Denoiser(model, config)


class MatchingDenoiser(Denoiser[C]):
    """Generates samples by the ODE, and noise at the levels of the window."""

    def window(self, steps: int, generator: torch.Generator) -> Sequence[int]:
        """Returns the step whose level each of the K noises has."""
        return [step for step in super().window(steps, generator) for _ in range(self.flow.draws)]

    @phase("denoising")
    @torch.no_grad()
    def sample_path(
        self,
        conditions: C,
        entries: Tensor,
        noise_seeds: Sequence[int],
        step_seeds: Sequence[int],
        *,
        steps: int,
        window: Sequence[int],
        shared_prefix: int = 1,
    ) -> DenoisedPath:
        """Returns the samples; the path's states are x, the next states u and the means v, each [B, K, C, h, w]."""
        schedule = self.model.schedule(steps)
        clean = self.integrate(conditions, entries, noise_seeds, steps)
        levels = [schedule.sigmas[step] for step in window]
        states, targets = noised(clean, [seed ^ STEP_NOISE for seed in step_seeds], levels)
        with on_device(self.model.transformer):
            found = [
                self._transition(states[:, column], conditions, entries, schedule, step)
                for column, step in enumerate(window)
            ]
        velocities = torch.stack([velocity for velocity, _ in found], 1)
        return DenoisedPath(
            latents=clean,
            states=states,
            next_states=targets,
            means=velocities,
            stds=[std for _, std in found],
            stats={"velocity_norm": float((_norms(velocities) / _norms(targets)).mean())},
        )

    def step(
        self, state: Tensor, conditions: C, entries: Tensor, schedule: Schedule, step: int
    ) -> tuple[Tensor, float]:
        """Returns v [b, C, h, w] at the noise level of ``step``, with gradient where it is on, and `STD`."""
        return self.model.velocity(conditions, entries)(state, schedule.timesteps[step]), STD


def noised(clean: Tensor, seeds: Sequence[int], levels: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Returns x and u of b samples [b, C, h, w] at K noise levels, both [b, K, C, h, w]; ``seeds``: [b]."""
    noise = noises(seeds, len(levels), clean.shape[1:]).to(clean.device)
    level = torch.tensor(levels, device=clean.device).view(1, -1, *[1] * (clean.ndim - 1))
    return (1 - level) * clean[:, None] + level * noise, noise - clean[:, None]


def _norms(velocities: Tensor) -> Tensor:
    """[b, K, C, h, w] -> [b, K]."""
    return velocities.flatten(2).norm(dim=2)
