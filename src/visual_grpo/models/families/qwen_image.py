"""Qwen-Image and Qwen-Image-Edit as a `FlowModel`; a test checks that its ODE matches the pipelines'.

Shapes: N records, b rows, C x h x w latents of one image, which the transformer reads as T = h w / 4 tokens of width
4 C. An edit's source image is S more tokens, of whatever size, and a part of the prompt.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from pydantic import Field
from torch import Tensor

from visual_grpo.common.errors import UserError
from visual_grpo.common.images import fit, read_image
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import ModelConfig, Strict
from visual_grpo.models.family import Family
from visual_grpo.models.flow.interface import Schedule, Velocity
from visual_grpo.models.flow.parts import (
    PaddedText,
    as_images,
    guided,
    latent_shape,
    mmdit_modules,
    packed,
    packed_schedule,
    unpacked,
)
from visual_grpo.models.loading import load_pipeline, saved_class
from visual_grpo.models.model import Model
from visual_grpo.models.offload import on_device
from visual_grpo.models.rows import distinct, source_count

_SOURCE_AREA = 1024 * 1024
"""Pixels that the pipeline brings every source to, whatever the size of the edited image."""


class QwenImageOptions(Strict):
    negative_prompt: str = Field(" ", description="what guidance steers away from")
    max_sequence_length: int = Field(512, ge=1, le=1024, description="text tokens of a prompt; edits are not cut")
    unconditional_gradient: bool = Field(True, description="train through both branches of the guidance")


@dataclass(frozen=True, kw_only=True)
class Conditions:
    prompts: PaddedText
    negative: PaddedText | None
    """The negative prompt of N entries: an edit's text has its source image in it. None without guidance."""
    sources: Tensor | None
    """[N, S, 4 C] float32."""
    guidance_scale: float


class QwenImage:
    def __init__(self, pipeline: Any, size: tuple[int, int], options: QwenImageOptions) -> None:
        """``size``: (height, width) in pixels, multiples of 16."""
        self.pipeline, self.transformer, self.size, self.options = pipeline, pipeline.transformer, size, options
        self.latent_shape = latent_shape(pipeline, size, self.transformer.config.in_channels // 4)
        self.edits = hasattr(pipeline, "processor")
        width, height, _ = pipeline_qwenimage_edit.calculate_dimensions(_SOURCE_AREA, size[1] / size[0])
        self._source_size = (height, width)
        self._decoding = threading.Lock()

    def schedule(self, steps: int) -> Schedule:
        return packed_schedule(self.pipeline.scheduler, steps, self.latent_shape)

    @torch.no_grad()
    def conditions(self, records: Sequence[PromptRecord], seeds: Sequence[int], guidance_scale: float) -> Conditions:
        count = source_count(records)
        if count != self.edits:
            raise UserError(
                f"{type(self.pipeline).__name__} takes {int(self.edits)} source images; {records[0].id!r} has {count}"
            )
        unique, index = distinct(records)
        images = [self._source(record) for record in unique if self.edits]
        seen: Sequence[Any] = images or [None] * len(unique)
        prompts = [self._encode(record.prompt, image) for record, image in zip(unique, seen, strict=True)]
        negatives = [self._encode(self.options.negative_prompt, image) for image in seen if guidance_scale > 1]
        return Conditions(
            prompts=PaddedText.of(prompts).rows(index),
            negative=PaddedText.of(negatives).rows(index) if negatives else None,
            sources=torch.cat([self._source_tokens(image) for image in images])[index] if images else None,
            guidance_scale=guidance_scale,
        )

    def velocity(self, conditions: Conditions, entries: Tensor) -> Velocity:
        """Each guided token is scaled to the norm of the conditional branch's.

        Without ``unconditional_gradient`` the other branch and the scale are constants to the gradient.
        """
        prompts, negative = conditions.prompts.rows(entries), conditions.negative and conditions.negative.rows(entries)
        sources = None if conditions.sources is None else conditions.sources[entries]
        both = self.options.unconditional_gradient

        def field(state: Tensor, timestep: float) -> Tensor:
            velocity = self._forward(state, timestep, prompts, sources)
            if negative is not None:
                other = partial(self._forward, state, timestep, negative, sources)
                mixed = guided(velocity, other, conditions.guidance_scale, both_branches=both)
                scale = velocity.norm(dim=-1, keepdim=True) / mixed.norm(dim=-1, keepdim=True)
                velocity = mixed * (scale if both else scale.detach())
            return unpacked(velocity, state.shape[2])

        return field

    @torch.no_grad()
    def pixels(self, latents: Tensor) -> list[Tensor]:
        mean, std = self._statistics(latents.device)
        latents = (latents[:, :, None] / (1 / std) + mean).to(self.pipeline.vae.dtype)
        with self._decoding:  # The VAE keeps features between its calls: two at a time would mix them up.
            return as_images(self.pipeline.vae.decode(latents, return_dict=False)[0][:, :, 0])

    def text_tokens(self, prompt: str) -> tuple[int, int]:
        """Returns a prompt's tokens and how many are read; an edit's text is not cut."""
        start = self.pipeline.prompt_template_encode_start_idx
        text = self.pipeline.prompt_template_encode.format(prompt)
        count = len(self.pipeline.tokenizer(text).input_ids) - start
        return count, count if self.edits else self.options.max_sequence_length

    def _forward(self, state: Tensor, timestep: float, text: PaddedText, sources: Tensor | None) -> Tensor:
        """[b, T, 4 C] float32."""
        dtype, tokens, (_, h, w) = self.transformer.dtype, packed(state), self.latent_shape
        shapes, cell = [(1, h // 2, w // 2)], 2 * self.pipeline.vae_scale_factor
        if sources is not None:
            shapes.append((1, self._source_size[0] // cell, self._source_size[1] // cell))
        velocity: Tensor = self.transformer(
            hidden_states=(tokens if sources is None else torch.cat([tokens, sources], 1)).to(dtype),
            timestep=torch.full((len(state),), timestep, dtype=dtype, device=state.device) / 1000,
            encoder_hidden_states=text.embeds,
            encoder_hidden_states_mask=text.mask,
            img_shapes=[shapes] * len(state),
            return_dict=False,
        )[0]
        return velocity[:, : tokens.shape[1]].float()

    def _encode(self, prompt: str, image: Any) -> Tensor:
        """[length, D]. One prompt at a time: the encoder keeps every layer's output."""
        image_argument, length = ({} if image is None else {"image": image}), self.options.max_sequence_length
        return self.pipeline.encode_prompt(prompt, max_sequence_length=length, **image_argument)[0][0]

    def _source(self, record: PromptRecord) -> Any:
        image = fit(read_image(record.source_images[0]), *self.size)
        return self.pipeline.image_processor.resize(image, *self._source_size)

    def _source_tokens(self, image: Any) -> Tensor:
        """[1, S, 4 C] float32."""
        vae = self.pipeline.vae
        pixels = self.pipeline.image_processor.preprocess(image, *self._source_size).unsqueeze(2)
        with on_device(vae):
            latents = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist.mode().float()
        mean, std = self._statistics(latents.device)
        return packed(((latents - mean) / std)[:, :, 0])

    def _statistics(self, device: torch.device) -> list[Tensor]:
        """Mean and standard deviation of the VAE's latents, [C, 1, 1, 1] float32."""
        config = self.pipeline.vae.config
        both = (config.latents_mean, config.latents_std)
        return [torch.tensor(values, device=device).view(-1, 1, 1, 1) for values in both]


_EDIT = "QwenImageEditPipeline"
_MODULES = mmdit_modules("img_mlp", "txt_mlp")


def load(path: str, config: ModelConfig) -> Any:
    return load_pipeline(_EDIT if saved_class(path) == _EDIT else "QwenImagePipeline", path, config)


FAMILY = Family(
    name="qwen_image",
    modules=_MODULES,
    tasks=("t2i", "i2i"),
    saved_as=("QwenImagePipeline", _EDIT),
    load=load,
    build=Model.builder(QwenImage, _MODULES),
    options=QwenImageOptions,
    plain_guidance=lambda scale: {"true_cfg_scale": scale},
)
