"""FLUX.1 (dev, Krea, schnell) as a `FlowModel`; a test checks that its ODE matches the pipeline's.

Guidance is distilled into the transformer: the scale is one of its inputs, and it runs once a step. Shapes: N prompts,
b rows, C x h x w latents of one image, which the transformer reads as T = h w / 4 tokens of width 4 C.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from PIL.Image import Image
from pydantic import Field
from torch import Tensor

from visual_grpo.common.types import PromptRecord
from visual_grpo.config import Strict
from visual_grpo.models.family import Family
from visual_grpo.models.flow.flow_model import Schedule, Velocity
from visual_grpo.models.flow.parts import (
    PooledText,
    TextConditions,
    concatenated,
    decoded,
    latent_shape,
    mmdit_modules,
    packed,
    shifted_schedule,
    tokens_and_limit,
    unpacked,
)
from visual_grpo.models.flow.references import References, by_size, read_sources
from visual_grpo.models.loading import load_pipeline
from visual_grpo.models.model import Model


class FluxOptions(Strict):
    max_sequence_length: int = Field(512, ge=1, le=512, description="T5 tokens of a prompt; schnell takes at most 256")


Conditions = TextConditions[PooledText]
"""T5's tokens, and CLIP's pooled embedding."""


class Flux:
    sources = range(1)
    """The numbers of source images that a record may have."""

    def __init__(self, pipeline: Any, size: tuple[int, int], options: FluxOptions) -> None:
        """``size``: (height, width) in pixels, multiples of 16."""
        self.pipeline, self.transformer, self.options = pipeline, pipeline.transformer, options
        self.latent_shape = latent_shape(pipeline, size, self.transformer.config.in_channels // 4)
        self.distilled = self.unguided = not self.transformer.config.guidance_embeds  # schnell

    def schedule(self, steps: int) -> Schedule:
        _, h, w = self.latent_shape
        return shifted_schedule(self.pipeline.scheduler, steps, h * w // 4)

    @torch.no_grad()
    def conditions(self, records: Sequence[PromptRecord], seeds: Sequence[int], guidance_scale: float) -> Conditions:
        references = read_sources(records, self.sources, self._source)
        return Conditions.of(records, self._encode, None, guidance_scale, references)

    def velocity(self, conditions: Conditions, entries: Tensor) -> Velocity:
        return by_size(conditions.references, entries, partial(self._field, conditions))

    def _field(self, conditions: Conditions, entries: Tensor, references: References) -> Velocity:
        """`velocity` of rows whose ``references``, all at time 1, have the same sizes."""
        prompts, (_, h, w) = concatenated(conditions.rows(entries)), self.latent_shape
        device, dtype = prompts.embeds.device, self.transformer.dtype
        image_ids = self.pipeline._prepare_latent_image_ids(len(entries), h // 2, w // 2, device, dtype)
        times = [1] * len(references.grids)
        image_ids = torch.cat([image_ids, references.positions(times).to(image_ids)])
        text_ids = torch.zeros(prompts.embeds.shape[1], 3, device=device, dtype=dtype)
        scale = torch.full((len(entries),), conditions.guidance_scale, device=device)
        guidance = None if self.distilled else scale

        def field(state: Tensor, timestep: float) -> Tensor:
            tokens = packed(state)
            velocity = self.transformer(
                hidden_states=references.beside(tokens).to(dtype),
                timestep=torch.full((len(state),), timestep, device=device, dtype=dtype) / 1000,
                guidance=guidance,
                pooled_projections=prompts.pooled,
                encoder_hidden_states=prompts.embeds,
                txt_ids=text_ids,
                img_ids=image_ids,
                return_dict=False,
            )[0]
            return unpacked(velocity[:, : tokens.shape[1]].float(), h)

        return field

    @torch.no_grad()
    def pixels(self, latents: Tensor) -> list[Tensor]:
        return decoded(self.pipeline.vae, latents)

    def text_tokens(self, prompt: str) -> tuple[int, int]:
        pipeline, length = self.pipeline, self.options.max_sequence_length
        clip = (pipeline.tokenizer, pipeline.tokenizer_max_length)
        return tokens_and_limit(prompt, clip, (pipeline.tokenizer_2, length))

    def _source(self, image: Image) -> Tensor:
        """[1, 4 C, rows, columns] of a source, where the pipeline takes one."""
        raise NotImplementedError

    def _encode(self, prompt: str) -> PooledText:
        length = self.options.max_sequence_length
        embeds, pooled, _ = self.pipeline.encode_prompt(prompt, None, max_sequence_length=length)
        return PooledText(embeds, pooled)


MODULES = mmdit_modules("ff", "ff_context")

FAMILY = Family(
    name="flux",
    modules=MODULES,
    tasks=("t2i",),
    saved_as=("FluxPipeline",),
    load=lambda path, config: load_pipeline("FluxPipeline", path, config),
    build=Model.builder(Flux, MODULES),
    options=FluxOptions,
)
