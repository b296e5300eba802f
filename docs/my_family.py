"""AuraFlow as a model family."""

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from visual_grpo.common.types import PromptRecord
from visual_grpo.config import Strict
from visual_grpo.models.family import Family
from visual_grpo.models.flow.flow_model import Schedule, Velocity
from visual_grpo.models.flow.parts import TextConditions, as_images, latent_shape, transformer_module
from visual_grpo.models.loading import load_pipeline
from visual_grpo.models.model import Model


class AuraFlowOptions(Strict):
    negative_prompt: str = Field("", description="what guidance steers away from")
    max_sequence_length: int = Field(256, ge=1, description="text tokens of a prompt")


Conditions = TextConditions[Tensor]  # Each prompt [1, L, D].


class AuraFlow:
    def __init__(self, pipeline: Any, size: tuple[int, int], options: AuraFlowOptions) -> None:
        self.pipeline, self.transformer, self.options = pipeline, pipeline.transformer, options
        self.latent_shape = latent_shape(pipeline, size, self.transformer.config.in_channels)

    def schedule(self, steps: int) -> Schedule:
        self.pipeline.scheduler.set_timesteps(steps)
        return Schedule.of(self.pipeline.scheduler)

    @torch.no_grad()
    def conditions(self, records: Sequence[PromptRecord], seeds: Sequence[int], guidance_scale: float) -> Conditions:
        return Conditions.of(records, self._encode, self.options.negative_prompt, guidance_scale)

    def velocity(self, conditions: Conditions, entries: Tensor) -> Velocity:
        return conditions.velocity(self._forward, torch.cat, entries)

    @torch.no_grad()
    def pixels(self, latents: Tensor) -> list[Tensor]:
        vae = self.pipeline.vae
        return as_images(vae.decode(latents.to(vae.dtype) / vae.config.scaling_factor, return_dict=False)[0])

    def _encode(self, prompt: str) -> Tensor:
        length = self.options.max_sequence_length
        encoded = self.pipeline.encode_prompt(prompt, do_classifier_free_guidance=False, max_sequence_length=length)
        return encoded[0]

    def _forward(self, state: Tensor, timestep: float, texts: Tensor) -> Tensor:
        dtype = self.transformer.dtype
        velocity: Tensor = self.transformer(
            state.to(dtype),
            encoder_hidden_states=texts,
            timestep=torch.full((len(state),), timestep / 1000, device=state.device, dtype=dtype),
            return_dict=False,
        )[0]
        return velocity.float()


MODULES = transformer_module(
    ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
)

FAMILY = Family(
    name="aura_flow",
    modules=MODULES,
    tasks=("t2i",),
    saved_as=("AuraFlowPipeline",),
    load=lambda path, config: load_pipeline("AuraFlowPipeline", path, config),
    build=Model.builder(AuraFlow, MODULES),
    options=AuraFlowOptions,
)
