"""Flux as a model family."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from visual_grpo.common.types import PromptRecord
from visual_grpo.config import Strict
from visual_grpo.models.family import Family, Module
from visual_grpo.models.flow import FlowGenerator, Schedule, Velocity
from visual_grpo.models.flow_parts import PooledText, as_images, latent_shape, packed, packed_schedule, unpacked
from visual_grpo.models.loading import load_pipeline
from visual_grpo.models.lora import PipelineAdapter
from visual_grpo.models.rows import distinct


class FluxOptions(Strict):
    max_sequence_length: int = Field(512, ge=1, le=512, description="T5 tokens of a prompt")


@dataclass(frozen=True, kw_only=True)
class Conditions:
    prompts: PooledText  # [N, L, D] of T5 and [N, P] of CLIP
    guidance_scale: float


class Flux:
    def __init__(self, pipeline: Any, size: tuple[int, int], options: FluxOptions) -> None:
        self.pipeline, self.transformer, self.options = pipeline, pipeline.transformer, options
        self.latent_shape = latent_shape(pipeline, size, self.transformer.config.in_channels // 4)

    def schedule(self, steps: int) -> Schedule:
        return packed_schedule(self.pipeline.scheduler, steps, self.latent_shape)

    @torch.no_grad()
    def conditions(self, records: Sequence[PromptRecord], seeds: Sequence[int], guidance_scale: float) -> Conditions:
        firsts, own = distinct(records)  # Each prompt is encoded once.
        length = self.options.max_sequence_length
        texts = [self.pipeline.encode_prompt(record.prompt, None, max_sequence_length=length) for record in firsts]
        prompts = PooledText.of([PooledText(embeds, pooled) for embeds, pooled, _ in texts])
        return Conditions(prompts=prompts.rows(own), guidance_scale=guidance_scale)

    def velocity(self, conditions: Conditions, entries: Tensor) -> Velocity:
        prompts, (_, h, w) = conditions.prompts.rows(entries), self.latent_shape
        device, dtype = prompts.embeds.device, self.transformer.dtype
        image_ids = self.pipeline._prepare_latent_image_ids(len(entries), h // 2, w // 2, device, dtype)
        text_ids = torch.zeros(prompts.embeds.shape[1], 3, device=device, dtype=dtype)
        scale = torch.full((len(entries),), conditions.guidance_scale, device=device)
        guidance = scale if self.transformer.config.guidance_embeds else None  # FLUX.1-schnell has none.

        def field(state: Tensor, timestep: float) -> Tensor:
            velocity = self.transformer(
                hidden_states=packed(state).to(dtype),
                timestep=torch.full((len(state),), timestep, device=device, dtype=dtype) / 1000,
                guidance=guidance,
                pooled_projections=prompts.pooled,
                encoder_hidden_states=prompts.embeds,
                txt_ids=text_ids,
                img_ids=image_ids,
                return_dict=False,
            )[0]
            return unpacked(velocity.float(), h)

        return field

    @torch.no_grad()
    def pixels(self, latents: Tensor) -> list[Tensor]:
        vae = self.pipeline.vae
        latents = latents / vae.config.scaling_factor + vae.config.shift_factor
        return as_images(vae.decode(latents.to(vae.dtype), return_dict=False)[0])


PARTS = ("tokenizer", "tokenizer_2", "text_encoder", "text_encoder_2", "vae", "transformer", "scheduler")
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
ADVICE = "a reward that sees what the early steps decide; policy.flow.noise between .4 and 1"
MODULES = {"dit": Module(kind="flow", adapter=PipelineAdapter, targets=TARGETS, advice=ADVICE)}

FAMILY = Family(
    name="flux",
    modules=MODULES,
    tasks=("t2i",),
    saved_as=("FluxPipeline",),
    load=lambda path, config: load_pipeline("FluxPipeline", path, config, PARTS),
    build=FlowGenerator.builder(Flux, MODULES),
    options=FluxOptions,
)
