"""Forward-process training: how well the model matches a sample stands for the sample's log-probability.

The ODE generates a sample x0. Noise e at the noise level s gives the state x = (1 - s) x0 + s e, whose velocity
is u = e - x0. Its log-probability is the density of u under N(v, 1/2), where v is the model's velocity of
x: ``-|v - u|^2`` up to a constant, the negative loss of flow matching. Old and new policy share the noise.

Sources: advantage weighted matching, arXiv 2509.25050; the comparison of likelihoods in arXiv 2602.04663; what the
velocity's norm tells, NormGuard, arXiv 2606.27771. Shapes: as in denoising.py, with K noises for each row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from visual_grpo.common.decisions import Matches
from visual_grpo.models.flow.transitions import noises, step_likelihoods

STD = math.sqrt(0.5)
"""Deviation of u around v, so that the squared error has the weight 1 of flow matching at every noise level."""


def noised(clean: Tensor, seeds: Sequence[int], levels: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Returns x and u of b samples [b, C, h, w] at K noise levels, both [b, K, C, h, w]; ``seeds``: [b]."""
    noise = noises(seeds, len(levels), clean.shape[1:]).to(clean.device)
    level = torch.tensor(levels, device=clean.device).view(1, -1, *[1] * (clean.ndim - 1))
    return (1 - level) * clean[:, None] + level * noise, noise - clean[:, None]


def matches(
    column: int, level: float, velocity: Tensor, old_velocity: Tensor, target: Tensor, reference: Tensor | None
) -> Matches:
    """Offers the noises of b rows in ``column``, at one level.

    Target, and velocities under the present policy, the old one and the ``reference``: [b, C, h, w].
    """
    read = step_likelihoods(column, STD, velocity, old_velocity, target, reference)
    return Matches(
        steps=read.steps,
        log_probs=read.log_probs,
        kl=read.kl,
        divergence=read.divergence,
        velocity=velocity[:, None],
        old_velocity=old_velocity[:, None],
        target=target[:, None],
        level=torch.tensor([level]),
    )
