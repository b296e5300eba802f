"""LTX-Video text to video as a `FlowModel`; a test checks that its ODE matches the pipeline's.

Shapes: N prompts, b rows, C x f x h x w latents of one video, whose F frames are 8 (f - 1) + 1; the transformer reads
them as T = f h w tokens of width C.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import LTXVideoTransformer3DModel
from pydantic import Field
from torch import Tensor

from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord, VideoSample
from visual_grpo.config import ModelConfig, Strict
from visual_grpo.models.family import Family
from visual_grpo.models.flow.flow_model import Schedule, Velocity
from visual_grpo.models.flow.parts import (
    MaskedText,
    TextConditions,
    as_videos,
    concatenated,
    shifted_schedule,
    tokens_and_limit,
    transformer_module,
)
from visual_grpo.models.loading import load_pipeline
from visual_grpo.models.lora import OriginalAdapter
from visual_grpo.models.model import Model
from visual_grpo.models.module import ModelSettings


class LtxOptions(Strict):
    max_sequence_length: int = Field(128, ge=1, le=512, description="T5 tokens of a prompt, padded to so many")
    negative_prompt: str = Field("", description="what guidance steers away from")


Conditions = TextConditions[MaskedText]


class Ltx:
    def __init__(self, pipeline: Any, settings: ModelSettings) -> None:
        """``settings``: a size of multiples of 32, 8 k + 1 frames."""
        assert settings.frames is not None, "Family.check_frames"
        self.pipeline, self.transformer, self.options = pipeline, pipeline.transformer, settings.options
        space, time = pipeline.vae_spatial_compression_ratio, pipeline.vae_temporal_compression_ratio
        h, w = (side // space for side in settings.size)
        self.latent_shape = (self.transformer.config.in_channels, (settings.frames - 1) // time + 1, h, w)
        self.fps = settings.fps
        self._position_scale = (time / settings.fps, space, space)  # Of a latent, in seconds and pixels.

    def schedule(self, steps: int) -> Schedule:
        _, f, h, w = self.latent_shape
        return shifted_schedule(self.pipeline.scheduler, steps, f * h * w)

    @torch.no_grad()
    def conditions(self, records: Sequence[PromptRecord], seeds: Sequence[int], guidance_scale: float) -> Conditions:
        return Conditions.of(records, self._encode, self.options.negative_prompt, guidance_scale)

    def velocity(self, conditions: Conditions, entries: Tensor) -> Velocity:
        return conditions.velocity(self._forward, concatenated, entries)

    @torch.no_grad()
    def pixels(self, latents: Tensor) -> list[VideoSample]:
        vae = self.pipeline.vae
        latents = self.pipeline._denormalize_latents(
            latents, vae.latents_mean, vae.latents_std, vae.config.scaling_factor
        )
        return as_videos(vae.decode(latents.to(vae.dtype), return_dict=False)[0], self.fps)

    def text_tokens(self, prompt: str) -> tuple[int, int]:
        return tokens_and_limit(prompt, (self.pipeline.tokenizer, self.options.max_sequence_length))

    def _encode(self, prompt: str) -> MaskedText:
        length = self.options.max_sequence_length
        embeds, mask, _, _ = self.pipeline.encode_prompt(
            prompt, do_classifier_free_guidance=False, max_sequence_length=length
        )
        return MaskedText(embeds, mask)

    def _forward(self, state: Tensor, timestep: float, text: MaskedText) -> Tensor:
        _, f, h, w = self.latent_shape
        velocity: Tensor = self.transformer(
            hidden_states=state.flatten(2).transpose(1, 2).to(self.transformer.dtype),
            timestep=torch.full((len(state),), timestep, device=state.device),
            encoder_hidden_states=text.embeds,
            encoder_attention_mask=text.mask,
            num_frames=f,
            height=h,
            width=w,
            rope_interpolation_scale=self._position_scale,
            return_dict=False,
        )[0]
        return velocity.float().transpose(1, 2).unflatten(2, (f, h, w))


def load(path: str, config: ModelConfig) -> Any:
    """Loads a folder or hub id, frozen."""
    pipeline = load_pipeline("LTXPipeline", path, config)
    is_ltx_2 = not isinstance(pipeline.transformer, LTXVideoTransformer3DModel)
    if is_ltx_2 or pipeline.vae.config.timestep_conditioning:
        raise UserError(
            f"The model {path!r} is not LTX-Video 0.9.0 (Lightricks/LTX-Video), which the family ltx needs: it is"
            " LTX-2, or its VAE samples noise as it decodes (since 0.9.1), so that the same latents would have other"
            " pixels, and other rewards, each time."
        )
    pipeline.vae.enable_slicing()  # One video is decoded at a time.
    return pipeline


_MODULES = transformer_module(["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"], OriginalAdapter)

FAMILY = Family(
    name="ltx",
    modules=_MODULES,
    tasks=("t2i",),
    saved_as=("LTXPipeline",),
    load=load,
    build=lambda pipeline, settings: Model(Ltx(pipeline, settings), _MODULES, settings),
    frame_counts=range(9, 258, 8),
    options=LtxOptions,
)
