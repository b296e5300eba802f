"""Wan 2.1 image to video: the source image is the first frame; a test compares it with its pipeline with Euler's steps.

Shapes: b rows, C x f x h x w latents of one video.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from PIL.Image import Image
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import ModelConfig
from visual_grpo.models.families import wan
from visual_grpo.models.families.wan import FRAME_COUNTS, MODULES, Conditions, Wan, WanOptions
from visual_grpo.models.family import Family
from visual_grpo.models.flow.flow_model import Velocity
from visual_grpo.models.flow.references import encode_sources, encoded
from visual_grpo.models.model import Model


class WanI2VOptions(WanOptions):
    max_sequence_length: Literal[512] = Field(
        512, description="text tokens of a prompt: after so many the transformer expects the image's tokens"
    )


class FirstFrame(NamedTuple):
    channels: Tensor
    """[1, 4 + C, f, h, w] float32, appended to the noise: 1 for each of the 4 frames of a latent one that is given, and
    the latents of a video that is grey after its first frame."""
    embeds: Tensor
    """[1, T, D], CLIP's."""


class WanI2V(Wan):
    sources = range(1, 2)

    @torch.no_grad()
    def conditions(self, records: Sequence[PromptRecord], seeds: Sequence[int], guidance_scale: float) -> Conditions:
        frames = [frame for (frame,) in encode_sources(records, self.sources, self._first_frame)]
        return Conditions.of(records, self._encode, self.options.negative_prompt, guidance_scale, frames)

    def velocity(self, conditions: Conditions, entries: Tensor) -> Velocity:
        frames = [conditions.references[entry] for entry in entries.tolist()]
        channels, embeds = (torch.cat(parts) for parts in zip(*frames, strict=True))

        def forward(state: Tensor, timestep: float, texts: Tensor) -> Tensor:
            return self._forward(torch.cat([state, channels], 1), timestep, texts, embeds)

        return conditions.velocity(forward, torch.cat, entries)

    def _first_frame(self, image: Image) -> FirstFrame:
        pipeline, (_, f, h, w) = self.pipeline, self.latent_shape
        pixels = pipeline.video_processor.preprocess(image, *self.size)
        video = pad(pixels.unsqueeze(2), (0, 0, 0, 0, 0, self.frames - 1))
        with self._vae_lock:
            latents = encoded(pipeline.vae, video)
        mean, std = self._statistics(latents.device)
        given = latents.new_zeros(1, pipeline.vae_scale_factor_temporal, f, h, w)
        given[:, :, 0] = 1
        embeds = pipeline.encode_image(image).to(self.transformer.dtype)
        return FirstFrame(torch.cat([given, (latents - mean) / std], 1), embeds)


def load(path: str, config: ModelConfig) -> Any:
    """Loads as `wan.load`."""
    pipeline = wan.load(path, config, "WanImageToVideoPipeline")
    reads = pipeline.transformer.config
    if reads.image_dim is None or reads.pos_embed_seq_len is not None:
        raise UserError(
            f"The model {path!r} does not read one first frame by CLIP, as Wan 2.1 I2V does: it reads none (Wan 2.2),"
            " or a last frame too (FLF2V)."
        )
    return pipeline


FAMILY = Family(
    name="wan_i2v",
    modules=MODULES,
    tasks=("i2i",),
    sources=WanI2V.sources,
    saved_as=("WanImageToVideoPipeline",),
    load=load,
    build=lambda pipeline, settings: Model(WanI2V(pipeline, settings), MODULES, settings),
    frame_counts=FRAME_COUNTS,
    options=WanI2VOptions,
)
