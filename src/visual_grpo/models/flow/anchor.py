"""An anchor to the base model's pictures: the trained model's velocity on them, noised, must stay the base model's.

The KL penalty compares the two models at the states of the trained one, where the base model, which knows none of them,
may be wrong about what it would do. The anchor's states are noised pictures of the base model (data-regularised
reinforcement learning, DDRL, arXiv 2512.04332, with synthetic data). The target of DDRL is noise minus picture, whose
mean is the base model's velocity only without guidance and with many steps: else it moves the base model itself.
Shapes: N prompts, b rows, S trained steps, C x h x w latents of one image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from visual_grpo.models.flow.denoising import Denoiser
from visual_grpo.models.flow.forward_process import noised, stratified
from visual_grpo.models.flow.interface import FlowModel
from visual_grpo.models.lora import Adapter
from visual_grpo.models.rows import ANCHOR_NOISE

C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """A picture of the base model for each prompt of a rollout, noised once for each trained step."""

    timesteps: tuple[float, ...]
    """[S], of the noise levels, as the transformer takes them."""
    states: Tensor
    """[N, S, C, h, w] float32, the noised pictures."""
    targets: Tensor
    """[N, S, C, h, w] float32, the base model's velocities there."""


@torch.no_grad()
def draw_anchor(
    denoiser: Denoiser[C],
    adapter: Adapter,
    conditions: C,
    seeds: Sequence[int],
    steps: int,
    count: int,
    generator: torch.Generator,
) -> Anchor:
    """Draws a picture of each of N prompts by the ODE without the adapter.

    Args:
        seeds: [N]; decide the pictures' noise, and their start noise, also the samples' with ``share_start_noise``.
        count: S; the levels are drawn one from each of so many parts of the ``steps``.
    """
    entries, schedule = torch.arange(len(seeds)), denoiser.model.schedule(steps)
    drawn = stratified(steps, count, generator)
    levels = [schedule.sigmas[step] for step in drawn]
    timesteps = tuple(schedule.timesteps[step] for step in drawn)
    with adapter.disabled():
        pictures = denoiser.integrate(conditions, entries, seeds, steps)
        states, _ = noised(pictures, [seed ^ ANCHOR_NOISE for seed in seeds], levels)
        targets = [
            denoiser.velocity(states[:, column], conditions, entries, timestep)
            for column, timestep in enumerate(timesteps)
        ]
    return Anchor(timesteps=timesteps, states=states, targets=torch.stack(targets, 1))


def anchor_loss(model: FlowModel[C], anchor: Anchor, column: int, conditions: C, entries: Tensor) -> Tensor:
    """Returns the mean squared difference of the velocities at the picture of b rows' prompts, [b, 1] with gradient.

    ``entries``: [b] int64, the rows' prompts.
    """
    own, row = entries.unique(return_inverse=True)
    velocity = model.velocity(conditions, own)(anchor.states[own, column], anchor.timesteps[column])
    return (velocity - anchor.targets[own, column]).square().flatten(1).mean(1)[row, None].cpu()
