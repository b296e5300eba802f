"""Qwen-Image as a `FlowModel`; a test checks that its ODE matches the pipeline's. qwen_image_edit.py builds on it.

Shapes: N records, b rows, C x h x w latents of one image, which the transformer reads as T = h w / 4 tokens of width
4 C.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
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
    PaddedText,
    as_images,
    guided,
    latent_shape,
    mmdit_modules,
    packed,
    shifted_schedule,
    unpacked,
)
from visual_grpo.models.flow.references import References, by_size, read_sources
from visual_grpo.models.loading import load_pipeline
from visual_grpo.models.model import Model
from visual_grpo.models.rows import distinct


def plain_guidance(scale: float) -> dict[str, Any]:
    """Returns the guidance scale as the pipelines call it."""
    return {"true_cfg_scale": scale}


class QwenImageEditOptions(Strict):
    """Options of the editing models, which cut no prompt and so need no length."""

    negative_prompt: str = Field(" ", description="what guidance steers away from")
    unconditional_gradient: bool = Field(True, description="train through both branches of the guidance")


class QwenImageOptions(QwenImageEditOptions):
    max_sequence_length: int = Field(512, ge=1, le=1024, description="text tokens of a prompt")


@dataclass(frozen=True, kw_only=True)
class Conditions:
    prompts: PaddedText
    negative: PaddedText | None
    """The negative prompt of N entries: an edit's text has its source images in it. None without guidance."""
    references: Sequence[References]
    guidance_scale: float


class QwenImage:
    sources = range(1)
    """The numbers of source images that a record may have."""

    def __init__(self, pipeline: Any, size: tuple[int, int], options: QwenImageOptions) -> None:
        """``size``: (height, width) in pixels, multiples of 16."""
        self.pipeline, self.transformer, self.size, self.options = pipeline, pipeline.transformer, size, options
        self.latent_shape = latent_shape(pipeline, size, self.transformer.config.in_channels // 4)
        self._decoding = threading.Lock()

    def schedule(self, steps: int) -> Schedule:
        _, h, w = self.latent_shape
        return shifted_schedule(self.pipeline.scheduler, steps, h * w // 4)

    @torch.no_grad()
    def conditions(self, records: Sequence[PromptRecord], seeds: Sequence[int], guidance_scale: float) -> Conditions:
        references = read_sources(records, self.sources, self._source)
        unique, index = distinct(records)
        prompts = [self._encode(record.prompt, record) for record in unique]
        negatives = [self._encode(self.options.negative_prompt, record) for record in unique if guidance_scale > 1]
        return Conditions(
            prompts=PaddedText.of(prompts).rows(index),
            negative=PaddedText.of(negatives).rows(index) if negatives else None,
            references=references,
            guidance_scale=guidance_scale,
        )

    def velocity(self, conditions: Conditions, entries: Tensor) -> Velocity:
        return by_size(conditions.references, entries, partial(self._field, conditions))

    def _field(self, conditions: Conditions, entries: Tensor, references: References) -> Velocity:
        """Each guided token is scaled to the norm of the conditional branch's.

        Without ``unconditional_gradient`` the other branch and the scale are constants to the gradient.
        """
        prompts, negative = conditions.prompts.rows(entries), conditions.negative and conditions.negative.rows(entries)
        both = self.options.unconditional_gradient

        def field(state: Tensor, timestep: float) -> Tensor:
            velocity = self._forward(state, timestep, prompts, references)
            if negative is not None:
                other = partial(self._forward, state, timestep, negative, references)
                mixed = guided(velocity, other, conditions.guidance_scale, both_branches=both)
                scale = velocity.norm(dim=-1, keepdim=True) / mixed.norm(dim=-1, keepdim=True)
                velocity = mixed * (scale if both else scale.detach())
            return unpacked(velocity, state.shape[2])

        return field

    @torch.no_grad()
    def pixels(self, latents: Tensor) -> list[Tensor]:
        mean, std = self.statistics(latents.device)
        latents = (latents[:, :, None] / (1 / std) + mean).to(self.pipeline.vae.dtype)
        with self._decoding:  # The VAE keeps features between its calls: two at a time would mix them up.
            return as_images(self.pipeline.vae.decode(latents, return_dict=False)[0][:, :, 0])

    def text_tokens(self, prompt: str) -> tuple[int, int]:
        return self._token_count(prompt), self.options.max_sequence_length

    def _token_count(self, prompt: str) -> int:
        start = self.pipeline.prompt_template_encode_start_idx
        text = self.pipeline.prompt_template_encode.format(prompt)
        return len(self.pipeline.tokenizer(text).input_ids) - start

    def _forward(self, state: Tensor, timestep: float, text: PaddedText, references: References) -> Tensor:
        """[b, T, 4 C] float32."""
        dtype, tokens, (_, h, w) = self.transformer.dtype, packed(state), self.latent_shape
        shapes = [(1, *grid) for grid in ((h // 2, w // 2), *references.grids)]
        velocity: Tensor = self.transformer(
            hidden_states=references.beside(tokens).to(dtype),
            timestep=torch.full((len(state),), timestep, dtype=dtype, device=state.device) / 1000,
            encoder_hidden_states=text.embeds,
            encoder_hidden_states_mask=text.mask,
            img_shapes=[shapes] * len(state),
            return_dict=False,
        )[0]
        return velocity[:, : tokens.shape[1]].float()

    def _encode(self, prompt: str, record: PromptRecord) -> Tensor:
        """[length, D]. One prompt at a time: the encoder keeps every layer's output."""
        return self.pipeline.encode_prompt(prompt, max_sequence_length=self.options.max_sequence_length)[0][0]

    def _source(self, image: Image) -> Tensor:
        """[1, 4 C, rows, columns] of a source, where the pipeline takes one."""
        raise NotImplementedError

    def statistics(self, device: torch.device) -> list[Tensor]:
        """Mean and standard deviation of the VAE's latents, [C, 1, 1, 1] float32."""
        config = self.pipeline.vae.config
        both = (config.latents_mean, config.latents_std)
        return [torch.tensor(values, device=device).view(-1, 1, 1, 1) for values in both]


MODULES = mmdit_modules("img_mlp", "txt_mlp")

FAMILY = Family(
    name="qwen_image",
    modules=MODULES,
    tasks=("t2i",),
    saved_as=("QwenImagePipeline",),
    load=lambda path, config: load_pipeline("QwenImagePipeline", path, config),
    build=Model.builder(QwenImage, MODULES),
    options=QwenImageOptions,
    plain_guidance=plain_guidance,
)
