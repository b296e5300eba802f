"""What every flow model must hold, whatever it is: used by the tests of each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.conftest import stir
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import FlowConfig, LoraParams, PolicyConfig, SamplerConfig
from visual_grpo.models.family import Family, ModelSettings
from visual_grpo.models.flow_sde import ode_step

PROMPTS = [
    "a cat",
    "a red circle on a blue square, under it " + "a long row of small signs, " * 16,
    "一只戴着红帽子的猫",
]
STEPS = 5


def records_of(sources: Sequence[Path] = ()) -> list[PromptRecord]:
    """Short, long and Chinese."""
    return [
        PromptRecord(id=str(i), prompt=prompt, source_images=tuple(sources[i : i + 1]))
        for i, prompt in enumerate(PROMPTS)
    ]


def noise_of(model: Any, count: int) -> Tensor:
    return torch.randn(count, *model.latent_shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def ode(model: Any, records: Sequence[PromptRecord], noise: Tensor, guidance_scale: float) -> Tensor:
    schedule = model.schedule(STEPS)
    conditions = model.conditions(records, range(len(records)), guidance_scale)
    velocity, state = model.velocity(conditions, torch.arange(len(records))), noise
    for timestep, (sigma, next_sigma) in zip(schedule.timesteps, pairwise(schedule.sigmas), strict=True):
        state = ode_step(velocity(state, timestep), state, sigma, next_sigma)
    return state


def far(ours: Tensor, want: Tensor) -> float:
    """Largest difference relative to the largest value."""
    return float((ours - want).abs().max() / want.abs().max())


def as_uint8(images: Any) -> Tensor:
    """A pipeline's ``np`` images [b, H, W, 3] as its ``pil`` ones are rounded, [b, 3, H, W]."""
    return torch.from_numpy((images * 255).round().astype("uint8")).permute(0, 3, 1, 2)


def generator_of(family: Family, pipeline: Any, size: tuple[int, int], *, attached: bool = True, **options: Any) -> Any:
    """The family's model with an adapter that is not zero."""
    config = PolicyConfig(flow=FlowConfig(window_start=1, window_steps=3), denoise_batch=4)
    settings = ModelSettings(size=size, policy=config, options=family.options(**options))
    model: Any = family.build(pipeline, settings)
    if attached:
        model.adapters.attach({"dit": LoraParams(rank=4, alpha=12)}, 3)
    return model


def policy_of(model: Any, guidance_scale: float) -> Any:
    sampler = SamplerConfig(steps=STEPS, guidance_scale=guidance_scale)
    policy = model.policy("dit", rollout=sampler, evaluation=sampler, kl_reference=True)
    stir(policy)
    return policy


def replay_error(policy: Any, records: Sequence[PromptRecord]) -> float:
    """Largest difference of log-probs, in units of a mean over the latent's elements, between sampling and replay of
    all rows and of some."""
    got = policy.rollout(records, 2, torch.Generator().manual_seed(3))
    elements = got.trajectory.states[0, 0].numel()
    errors = []
    for rows in (torch.arange(6), torch.tensor([4, 1])):
        replayed = torch.cat([chunk.log_probs for chunk in policy.replay(got.trajectory, rows)], 1)
        errors.append(float((replayed.detach() - got.log_probs[rows]).abs().max()) / elements**0.5)
    return max(errors)


def untrained(policy: Any, records: Sequence[PromptRecord]) -> list[str]:
    """Names of the adapter's tensors that the rollout's log-probs give no gradient."""
    got = policy.rollout(records, 2, torch.Generator().manual_seed(3))
    for chunk in policy.replay(got.trajectory, torch.arange(6)):
        chunk.log_probs.sum().backward()
    named = policy.model.transformer.named_parameters()
    return [name for name, p in named if p.requires_grad and (p.grad is None or not p.grad.abs().max() > 0)]
