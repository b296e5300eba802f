"""Stable Diffusion 3 and 3.5 as a `FlowModel`; a test checks that its ODE matches the pipeline's.

Shapes: N prompts, b rows, C x h x w latents of one image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import ModelConfig, Strict
from visual_grpo.models.family import Family
from visual_grpo.models.flow.flow_model import Schedule, Velocity
from visual_grpo.models.flow.parts import (
    PooledText,
    TextConditions,
    concatenated,
    decoded,
    latent_shape,
    mmdit_modules,
    shift_of,
    tokens_and_limit,
)
from visual_grpo.models.loading import load_pipeline
from visual_grpo.models.model import Model


class Sd3Options(Strict):
    max_sequence_length: int = Field(
        256, ge=0, le=512, description="T5 tokens of a prompt; 0 = only the two CLIPs, and T5 is not even loaded"
    )
    negative_prompt: str = Field("", description="what guidance steers away from")


Conditions = TextConditions[PooledText]
"""CLIP's tokens come before T5's."""


class Sd3:
    def __init__(self, pipeline: Any, size: tuple[int, int], options: Sd3Options) -> None:
        """``size``: (height, width) in pixels, multiples of 16."""
        self.pipeline, self.transformer, self.options = pipeline, pipeline.transformer, options
        self.latent_shape = latent_shape(pipeline, size, self.transformer.config.in_channels)
        limits = self.transformer.config
        largest = limits.pos_embed_max_size * limits.patch_size * pipeline.vae_scale_factor
        if max(size) > largest:
            raise UserError(
                f"A picture of {size[0]} x {size[1]} is too large: this model has positions for {largest} pixels a"
                " side. Lower data.height and data.width, and sampling.rollout.height and .width where they are set."
            )

    def schedule(self, steps: int) -> Schedule:
        """Returns the pipeline's schedule; its shift depends on the size only where the scheduler says so."""
        scheduler, (_, h, w) = self.pipeline.scheduler, self.latent_shape
        tokens = h * w // self.transformer.config.patch_size**2
        scheduler.set_timesteps(
            steps, mu=shift_of(scheduler, tokens) if scheduler.config.use_dynamic_shifting else None
        )
        return Schedule.of(scheduler)

    @torch.no_grad()
    def conditions(self, records: Sequence[PromptRecord], seeds: Sequence[int], guidance_scale: float) -> Conditions:
        return Conditions.of(records, self._encode, self.options.negative_prompt, guidance_scale)

    def velocity(self, conditions: Conditions, entries: Tensor) -> Velocity:
        return conditions.velocity(self._forward, concatenated, entries)

    @torch.no_grad()
    def pixels(self, latents: Tensor) -> list[Tensor]:
        return decoded(self.pipeline.vae, latents)

    def text_tokens(self, prompt: str) -> tuple[int, int]:
        pipeline = self.pipeline
        readers = [(pipeline.tokenizer, pipeline.tokenizer_max_length)]
        if pipeline.text_encoder_3 is not None:
            readers.append((pipeline.tokenizer_3, self.options.max_sequence_length))
        return tokens_and_limit(prompt, *readers)

    def _encode(self, prompt: str) -> PooledText:
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            prompt, None, None, do_classifier_free_guidance=False, max_sequence_length=self.options.max_sequence_length
        )
        return PooledText(embeds, pooled)

    def _forward(self, state: Tensor, timestep: float, text: PooledText) -> Tensor:
        velocity: Tensor = self.transformer(
            hidden_states=state.to(self.transformer.dtype),
            timestep=torch.full((len(state),), timestep, device=state.device),
            encoder_hidden_states=text.embeds,
            pooled_projections=text.pooled,
            return_dict=False,
        )[0]
        return velocity.float()


_T5 = ("tokenizer_3", "text_encoder_3")
_MODULES = mmdit_modules("ff", "ff_context")


def load(path: str, config: ModelConfig) -> Any:
    """Loads a folder or hub id, frozen; T5 may be missing, and is not loaded if ``max_sequence_length`` is 0."""
    without = _T5 if Sd3Options.model_validate(config.options).max_sequence_length == 0 else ()
    return load_pipeline("StableDiffusion3Pipeline", path, config, optional=_T5, without=without)


FAMILY = Family(
    name="sd3",
    modules=_MODULES,
    tasks=("t2i",),
    saved_as=("StableDiffusion3Pipeline",),
    load=load,
    build=Model.builder(Sd3, _MODULES),
    options=Sd3Options,
)
