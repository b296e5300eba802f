"""Z-Image and Z-Image-Turbo as a `FlowModel`; a test checks that its ODE matches the pipeline's.

The pipeline adds ``guidance_scale`` times the difference of its branches to the conditional one, so that its 0 is the 1
of all other families, and its 4 their 5. Shapes: N prompts, b rows, C x h x w latents of one image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from visual_grpo.common.types import PromptRecord
from visual_grpo.config import Strict
from visual_grpo.models.family import Family
from visual_grpo.models.flow.flow_model import Schedule, Velocity
from visual_grpo.models.flow.parts import (
    TextConditions,
    decoded,
    latent_shape,
    shifted_schedule,
    tokens_and_limit,
    transformer_module,
)
from visual_grpo.models.loading import load_pipeline
from visual_grpo.models.model import Model

_BASE_SHIFT = 6.0
"""Shift of the released Z-Image's scheduler; Turbo, whose classes are the same, has 3."""


class ZImageOptions(Strict):
    negative_prompt: str = Field("", description="what guidance steers away from")
    max_sequence_length: int = Field(512, ge=1, le=1024, description="text tokens of a prompt")


Conditions = TextConditions[Tensor]
"""Each prompt [length, D]: the transformer pads it by itself."""


class ZImage:
    def __init__(self, pipeline: Any, size: tuple[int, int], options: ZImageOptions) -> None:
        """``size``: (height, width) in pixels, multiples of 16."""
        self.pipeline, self.transformer, self.options = pipeline, pipeline.transformer, options
        self.latent_shape = latent_shape(pipeline, size, self.transformer.config.in_channels)
        self.distilled = pipeline.scheduler.config.shift < _BASE_SHIFT

    def schedule(self, steps: int) -> Schedule:
        _, h, w = self.latent_shape
        return shifted_schedule(self.pipeline.scheduler, steps, h * w // 4)

    @torch.no_grad()
    def conditions(self, records: Sequence[PromptRecord], seeds: Sequence[int], guidance_scale: float) -> Conditions:
        return Conditions.of(records, self._encode, self.options.negative_prompt, guidance_scale)

    def velocity(self, conditions: Conditions, entries: Tensor) -> Velocity:
        return conditions.velocity(self._forward, list, entries)

    @torch.no_grad()
    def pixels(self, latents: Tensor) -> list[Tensor]:
        return decoded(self.pipeline.vae, latents)

    def text_tokens(self, prompt: str) -> tuple[int, int]:
        tokenizer, message = self.pipeline.tokenizer, {"role": "user", "content": prompt}
        text = tokenizer.apply_chat_template(
            [message], tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        return tokens_and_limit(text, (tokenizer, self.options.max_sequence_length))

    def _encode(self, prompt: str) -> Tensor:
        """[length, D], without padding."""
        length = self.options.max_sequence_length
        texts, _ = self.pipeline.encode_prompt(prompt, do_classifier_free_guidance=False, max_sequence_length=length)
        return texts[0]

    def _forward(self, state: Tensor, timestep: float, texts: list[Tensor]) -> Tensor:
        """The transformer takes the share of the image, 0 to 1, and predicts image minus noise."""
        images = list(state.to(self.transformer.dtype)[:, :, None])
        share = (1000 - torch.full((len(state),), timestep, device=state.device)) / 1000
        return -torch.stack(self.transformer(images, share, texts, return_dict=False)[0]).squeeze(2).float()


_MODULES = transformer_module(["to_q", "to_k", "to_v", "to_out.0", "w1", "w2", "w3"])

FAMILY = Family(
    name="z_image",
    modules=_MODULES,
    tasks=("t2i",),
    saved_as=("ZImagePipeline",),
    load=lambda path, config: load_pipeline("ZImagePipeline", path, config),
    build=Model.builder(ZImage, _MODULES),
    options=ZImageOptions,
    plain_guidance=lambda scale: {"guidance_scale": scale - 1},
)
