"""Calls the plain pipeline of diffusers that a family describes, and records its latents and noise levels."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visual_grpo.common.errors import UserError
from visual_grpo.common.images import read_image
from visual_grpo.common.types import PromptRecord
from visual_grpo.models.family import Family
from visual_grpo.models.flow.flow_model import Schedule
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
    """[B, 3, H, W] uint8; of videos [B, F, 3, H, W]."""


_CALL = (
    "\nIts call needs the arguments prompt, height, width, num_inference_steps, generator and output_type, those that"
    " Family.plain_guidance gives, and no further required ones (image, for edits)."
)


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

    Options of the family that the pipeline's call has too are passed on to it. Records with sources are generated
    one by one: pipelines differ in what a list of images means to them.
    """
    firsts, lasts, pictures = [], [], []
    size = 1 if any(record.source_images for record in records) else len(records)
    for start in range(0, len(records), size):
        part = records[start : start + size]
        arguments = _arguments(family, pipeline, settings, part, guidance_scale)
        with _recorded(pipeline.scheduler) as states:
            try:
                given = pipeline(
                    num_inference_steps=steps,
                    generator=[torch.Generator().manual_seed(start + row) for row in range(len(part))],
                    output_type="np" if images else "latent",
                    **arguments,
                )[0]  # Images, or the frames of videos.
            except (TypeError, ValueError) as error:
                needs = _CALL if isinstance(error, TypeError) else ""
                raise UserError(
                    f"{type(pipeline).__name__} cannot be called for the check of {family.name}: {error}{needs}"
                ) from error
        firsts.append(states[0])
        lasts.append(states[-1])
        pictures.append(given)
    return PlainRun(
        records=records,
        guidance_scale=guidance_scale,
        schedule=Schedule.of(pipeline.scheduler),
        first=torch.cat(firsts),
        last=torch.cat(lasts),
        images=_uint8(np.concatenate(pictures)) if images else None,
    )


def _arguments(
    family: Family, pipeline: Any, settings: ModelSettings, records: Sequence[PromptRecord], guidance_scale: float
) -> dict[str, Any]:
    """Returns arguments of the pipeline's call by their names."""
    assert family.plain_guidance is not None
    height, width = settings.size
    # Some pipelines fit height and width to an area; a leading _ marks what few callers change.
    offered = {**settings.options.model_dump(), "max_area": height * width}
    if settings.frames is not None:
        offered |= {"num_frames": settings.frames, "frame_rate": settings.fps}
    known = inspect.signature(pipeline.__call__).parameters
    given = {name: offered[name.removeprefix("_")] for name in known if name.removeprefix("_") in offered}
    if "negative_prompt" in given:  # As many as prompts: some pipelines take no single one.
        given["negative_prompt"] = [given["negative_prompt"]] * len(records) if guidance_scale > 1 else None
    if records[0].source_images:
        sources = [read_image(path) for path in records[0].source_images]
        given["image"] = sources if len(sources) > 1 else sources[0]
    prompts = [record.prompt for record in records]
    return {"prompt": prompts, "height": height, "width": width, **given, **family.plain_guidance(guidance_scale)}


def _uint8(images: Any) -> Tensor:
    """[..., H, W, 3] from 0 to 1 -> [..., 3, H, W]."""
    return torch.from_numpy((images * 255).round().astype("uint8")).movedim(-1, -3)


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
