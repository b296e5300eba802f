"""Calls the plain pipeline of diffusers that a family describes, and records its latents and noise levels."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord
from visual_grpo.models.family import Family
from visual_grpo.models.flow.interface import Schedule
from visual_grpo.models.module import ModelSettings


@dataclass(frozen=True, kw_only=True)
class PlainRun:
    """The result of a pipeline's own call."""

    records: Sequence[PromptRecord]
    guidance_scale: float
    schedule: Schedule
    first: Tensor
    """The latents before the first step, as the pipeline holds them."""
    last: Tensor
    """The latents after the last step."""
    images: Tensor | None
    """[B, 3, H, W] uint8."""


@torch.no_grad()
def run_plain(
    family: Family,
    pipeline: Any,
    settings: ModelSettings,
    records: Sequence[PromptRecord],
    steps: int,
    guidance_scale: float,
    *,
    images: bool = False,
) -> PlainRun:
    """Calls the pipeline with a generator for each row, seeded with the row's number.

    Options of the family that the pipeline's call has too are passed on to it.
    """
    assert family.plain_guidance is not None
    known = inspect.signature(pipeline.__call__).parameters
    options = {name: value for name, value in settings.options.model_dump().items() if name in known}
    if "negative_prompt" in options:  # As many as prompts: some pipelines take no single one.
        options["negative_prompt"] = [options["negative_prompt"]] * len(records) if guidance_scale > 1 else None
    with _recorded(pipeline.scheduler) as states:
        try:
            given = pipeline(
                prompt=[record.prompt for record in records],
                height=settings.size[0],
                width=settings.size[1],
                num_inference_steps=steps,
                generator=[torch.Generator().manual_seed(row) for row in range(len(records))],
                output_type="np" if images else "latent",
                **options,
                **family.plain_guidance(guidance_scale),
            ).images
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{type(pipeline).__name__} cannot be called for the check of {family.name}: {error}\nIts call needs"
                " the arguments prompt, height, width, num_inference_steps, generator and output_type, those that"
                " Family.plain_guidance gives, and none that is required beside them."
            ) from error
    return PlainRun(
        records=records,
        guidance_scale=guidance_scale,
        schedule=Schedule.of(pipeline.scheduler),
        first=states[0],
        last=states[-1],
        images=torch.from_numpy((given * 255).round().astype("uint8")).permute(0, 3, 1, 2) if images else None,
    )


@contextmanager
def _recorded(scheduler: Any) -> Iterator[list[Tensor]]:
    """Collects the states that ``scheduler.step`` gets and gives in the block: the start, and one a step."""
    states: list[Tensor] = []
    step = scheduler.step

    def record(output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = step(output, timestep, sample, *args, **kwargs)
        states.extend([sample] * (not states))
        states.append(result[0])
        return result

    scheduler.step = record
    try:
        yield states
    finally:
        del scheduler.step
