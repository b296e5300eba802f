"""What the tests of single flow families share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.conftest import stir
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import FlowConfig, LoraParams, PolicyConfig, SamplerConfig
from visual_grpo.models import family_check
from visual_grpo.models.family import Family
from visual_grpo.models.family_check import PROMPTS, STEPS, far, replay_error
from visual_grpo.models.module import ModelSettings

__all__ = ["STEPS", "as_uint8", "far", "generator_of", "noise_of", "ode", "policy_of", "records_of", "replay_error"]


def records_of(sources: Sequence[Path] = ()) -> list[PromptRecord]:
    """Short, long and Chinese."""
    return [
        PromptRecord(id=str(i), prompt=prompt, source_images=tuple(sources[i : i + 1]))
        for i, prompt in enumerate(PROMPTS)
    ]


def noise_of(model: Any, count: int) -> Tensor:
    return torch.randn(count, *model.latent_shape, generator=torch.Generator().manual_seed(1))


def ode(model: Any, records: Sequence[PromptRecord], noise: Tensor, guidance_scale: float) -> Tensor:
    with torch.no_grad():
        return family_check.ode(model, records, noise, guidance_scale, STEPS)


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
