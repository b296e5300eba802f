"""Wan 2.1 text to video as a `FlowModel`; a test checks that its ODE matches the pipeline's with Euler's steps.
wan_i2v.py builds on it.

Shapes: N prompts, b rows, C x f x h x w latents of one video, whose F frames are 4 (f - 1) + 1.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from pydantic import Field
from torch import Tensor

from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord, VideoSample
from visual_grpo.config import ModelConfig, Strict
from visual_grpo.models.family import Family
from visual_grpo.models.flow.flow_model import Schedule, Velocity
from visual_grpo.models.flow.parts import TextConditions, as_videos, tokens_and_limit, transformer_module
from visual_grpo.models.loading import load_pipeline
from visual_grpo.models.lora import OriginalAdapter
from visual_grpo.models.model import Model
from visual_grpo.models.module import ModelSettings


class WanOptions(Strict):
    max_sequence_length: int = Field(512, ge=1, le=512, description="text tokens of a prompt, padded to so many")
    negative_prompt: str = Field("", description="what guidance steers away from")
    shift: float | None = Field(
        None, gt=0, description="shift of the noise levels: more steps at high noise; null = the checkpoint's"
    )
    tiles: bool = Field(
        False,
        description="decode in tiles of 256 pixels that overlap: less memory, more time, slightly different pixels",
    )


Conditions = TextConditions[Tensor]
"""Each prompt [1, L, D], zero after its tokens, which the transformer reads as the pipeline lets it."""


class Wan:
    def __init__(self, pipeline: Any, settings: ModelSettings) -> None:
        """``settings``: a size of multiples of 16, 4 k + 1 frames."""
        assert settings.frames is not None, "Family.check_frames"
        self.pipeline, self.transformer, self.options = pipeline, pipeline.transformer, settings.options
        h, w = (side // pipeline.vae_scale_factor_spatial for side in settings.size)
        latent_frames = (settings.frames - 1) // pipeline.vae_scale_factor_temporal + 1
        self.latent_shape = (self.transformer.config.out_channels, latent_frames, h, w)
        self.size, self.frames, self.fps = settings.size, settings.frames, settings.fps
        self._vae_lock = threading.Lock()  # The VAE keeps features between its calls: two at a time would mix them up.
        if self.options.tiles:
            pipeline.vae.enable_tiling()

    def schedule(self, steps: int) -> Schedule:
        """Returns Euler's schedule, whose shift does not depend on the size."""
        self.pipeline.scheduler.set_timesteps(steps)
        return Schedule.of(self.pipeline.scheduler)

    @torch.no_grad()
    def conditions(self, records: Sequence[PromptRecord], seeds: Sequence[int], guidance_scale: float) -> Conditions:
        return Conditions.of(records, self._encode, self.options.negative_prompt, guidance_scale)

    def velocity(self, conditions: Conditions, entries: Tensor) -> Velocity:
        return conditions.velocity(self._forward, torch.cat, entries)

    @torch.no_grad()
    def pixels(self, latents: Tensor) -> list[VideoSample]:
        vae, (mean, std) = self.pipeline.vae, self._statistics(latents.device)
        latents = latents.to(vae.dtype) / (1 / std) + mean
        with self._vae_lock:
            decoded = vae.decode(latents, return_dict=False)[0]
        return as_videos(decoded, self.fps)

    def text_tokens(self, prompt: str) -> tuple[int, int]:
        return tokens_and_limit(prompt_clean(prompt), (self.pipeline.tokenizer, self.options.max_sequence_length))

    def _encode(self, prompt: str) -> Tensor:
        """[1, L, D]."""
        length = self.options.max_sequence_length
        text, _ = self.pipeline.encode_prompt(prompt, do_classifier_free_guidance=False, max_sequence_length=length)
        return text.to(self.transformer.dtype)

    def _statistics(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the mean and deviation of each of the VAE's latents, each [C, 1, 1, 1]."""
        vae = self.pipeline.vae
        mean, std = (
            torch.tensor(values, device=device, dtype=vae.dtype).view(-1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        return mean, std

    def _forward(self, state: Tensor, timestep: float, texts: Tensor, images: Tensor | None = None) -> Tensor:
        """``images``: [b, T, D], embeddings of first frames, where the transformer takes them."""
        velocity: Tensor = self.transformer(
            hidden_states=state.to(self.transformer.dtype),
            timestep=torch.full((len(state),), timestep, device=state.device),
            encoder_hidden_states=texts,
            encoder_hidden_states_image=images,
            return_dict=False,
        )[0]
        return velocity.float()


def load(path: str, config: ModelConfig, pipeline_class: str = "WanPipeline") -> Any:
    """Loads a folder or hub id, frozen, with Euler's steps in place of the checkpoint's UniPC, whose steps depend on
    earlier ones and have no likelihood, and with the shift of ``config.options``; VAE and image encoder in float32, as
    their authors use them."""
    prepare = partial(_prepare, shift=config.options.get("shift"))
    pipeline = load_pipeline(pipeline_class, path, config, in_float32=("vae", "image_encoder"), prepare=prepare)
    if pipeline.transformer_2 is not None or pipeline.config.expand_timesteps:
        raise UserError(f"The model {path!r} is of Wan 2.2; the families wan and wan_i2v need Wan 2.1.")
    pipeline.vae.enable_slicing()  # One video is decoded at a time.
    return pipeline


def _prepare(pipeline: Any, shift: Any) -> None:
    saved = pipeline.scheduler
    key = "flow_shift" if "flow_shift" in saved.config else "shift"
    if shift is not None:
        saved = type(saved).from_config(saved.config, **{key: shift})
    if key == "shift":  # Of flow matching: Euler's, or refused.
        pipeline.scheduler = saved
    else:
        pipeline.saved_scheduler = saved
        pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=saved.config.flow_shift)


class WanAdapter(OriginalAdapter):
    parts: ClassVar = {
        **{
            f"{attention}.{name}": f"{original}.{part}"
            for attention, original in (("attn1", "self_attn"), ("attn2", "cross_attn"))
            for name, part in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "o"))
        },
        **{f"attn2.add_{part}_proj": f"cross_attn.{part}_img" for part in "kv"},
        "ffn.net.0.proj": "ffn.0",
        "ffn.net.2": "ffn.2",
        **{
            f"condition_embedder.{name}_embedder.linear_{number}": f"{name}_embedding.{layer}"
            for name in ("text", "time")
            for number, layer in ((1, 0), (2, 2))
        },
        "condition_embedder.time_proj": "time_projection.1",
        "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
        "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
        "proj_out": "head.head",
    }


MODULES = transformer_module(
    ["to_q", "to_k", "to_v", "to_out.0", "add_k_proj", "add_v_proj", "ffn.net.0.proj", "ffn.net.2"], WanAdapter
)
"""``add_*``: of image to video."""
FRAME_COUNTS = range(5, 82, 4)

FAMILY = Family(
    name="wan",
    modules=MODULES,
    tasks=("t2i",),
    saved_as=("WanPipeline",),
    load=load,
    build=lambda pipeline, settings: Model(Wan(pipeline, settings), MODULES, settings),
    frame_counts=FRAME_COUNTS,
    options=WanOptions,
)
