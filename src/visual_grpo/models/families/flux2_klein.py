"""FLUX.2 klein (base and distilled, 4B and 9B) as a `FlowModel`, with up to four images to edit or to refer to.

A test checks that its ODE matches the pipeline's. Shapes: N prompts, b rows, C x h x w normalised patches of one image:
a patch is 2 x 2 of the VAE's latents.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from PIL.Image import Image
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad, pixel_shuffle, pixel_unshuffle

from visual_grpo.common.types import PromptRecord
from visual_grpo.config import Strict
from visual_grpo.models.family import Family
from visual_grpo.models.flow.flow_model import Schedule, Velocity
from visual_grpo.models.flow.parts import TextConditions, as_images, tokens_and_limit, transformer_module
from visual_grpo.models.flow.references import References, by_size, encoded, read_sources
from visual_grpo.models.loading import load_pipeline
from visual_grpo.models.model import Model
from visual_grpo.models.offload import on_device


class Flux2KleinOptions(Strict):
    max_sequence_length: int = Field(512, ge=1, le=512, description="text tokens of a prompt, padded to so many")


Conditions = TextConditions[Tensor]
"""Each prompt [1, L, D], with padding that the transformer reads as the pipeline lets it."""
_MOST_PIXELS = 1024 * 1024
"""Larger sources are scaled down to so many, as the pipeline does."""


class Flux2Klein:
    sources = range(5)
    """The numbers of source images that a record may have, by the publisher's guide."""

    def __init__(self, pipeline: Any, size: tuple[int, int], options: Flux2KleinOptions) -> None:
        """``size``: (height, width) in pixels, multiples of 16."""
        self.pipeline, self.transformer, self.options = pipeline, pipeline.transformer, options
        patch = 2 * pipeline.vae_scale_factor
        self.latent_shape = (self.transformer.config.in_channels, size[0] // patch, size[1] // patch)
        self.distilled = self.unguided = pipeline.config.is_distilled

    def schedule(self, steps: int) -> Schedule:
        """Returns the pipeline's schedule, whose shift depends on the numbers of patches and of steps."""
        _, h, w = self.latent_shape
        mu = compute_empirical_mu(image_seq_len=h * w, num_steps=steps)
        self.pipeline.scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps), mu=mu)
        return Schedule.of(self.pipeline.scheduler)

    @torch.no_grad()
    def conditions(self, records: Sequence[PromptRecord], seeds: Sequence[int], guidance_scale: float) -> Conditions:
        references = read_sources(records, self.sources, self._source)
        return Conditions.of(records, self._encode, None if self.distilled else "", guidance_scale, references)

    def velocity(self, conditions: Conditions, entries: Tensor) -> Velocity:
        return by_size(conditions.references, entries, partial(self._field, conditions))

    def _field(self, conditions: Conditions, entries: Tensor, references: References) -> Velocity:
        first = conditions.prompts[0]
        device, dtype = first.device, self.transformer.dtype
        text_ids = self.pipeline._prepare_text_ids(first.expand(len(entries), -1, -1)).to(device)
        image_ids = self.pipeline._prepare_latent_ids(torch.empty(1, *self.latent_shape))[0]
        # The k-th source is at time 10 k, from 1; the fourth coordinate is for the text.
        times = range(10, 10 * len(references.grids) + 1, 10)
        image_ids = torch.cat([image_ids, pad(references.positions(times), (0, 1))]).to(device)

        def forward(state: Tensor, timestep: float, texts: Tensor) -> Tensor:
            tokens = state.flatten(2).transpose(1, 2)
            velocity: Tensor = self.transformer(
                hidden_states=references.beside(tokens).to(dtype),
                timestep=torch.full((len(state),), timestep, device=device, dtype=dtype) / 1000,
                guidance=None,
                encoder_hidden_states=texts,
                txt_ids=text_ids,
                img_ids=image_ids.expand(len(state), -1, -1),
                return_dict=False,
            )[0]
            return velocity[:, : tokens.shape[1]].float().transpose(1, 2).unflatten(2, self.latent_shape[1:])

        return conditions.velocity(forward, torch.cat, entries)

    @torch.no_grad()
    def pixels(self, latents: Tensor) -> list[Tensor]:
        vae = self.pipeline.vae
        with on_device(vae):
            mean, std = self._statistics()
            latents = latents * std + mean
            return as_images(vae.decode(pixel_shuffle(latents, 2).to(vae.dtype), return_dict=False)[0])

    def text_tokens(self, prompt: str) -> tuple[int, int]:
        tokenizer, message = self.pipeline.tokenizer, {"role": "user", "content": prompt}
        text = tokenizer.apply_chat_template(
            [message], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        return tokens_and_limit(text, (tokenizer, self.options.max_sequence_length))

    def _encode(self, prompt: str) -> Tensor:
        """[1, L, D]."""
        return self.pipeline.encode_prompt(prompt, max_sequence_length=self.options.max_sequence_length)[0]

    def _source(self, image: Image) -> Tensor:
        """[1, C, rows, columns]. Raises ValueError for an image that the pipeline refuses."""
        processor, patch = self.pipeline.image_processor, 2 * self.pipeline.vae_scale_factor
        processor.check_image_input(image)
        image = processor._resize_if_exceeds_area(image, _MOST_PIXELS)
        width, height = (side // patch * patch for side in image.size)
        latents = encoded(self.pipeline.vae, processor.preprocess(image, height, width, resize_mode="crop"))
        with on_device(self.pipeline.vae):
            mean, std = self._statistics()
            return (pixel_unshuffle(latents, 2) - mean) / std

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of patches, each [1, C, 1, 1]."""
        vae = self.pipeline.vae
        mean, variance = (value.view(1, -1, 1, 1) for value in (vae.bn.running_mean, vae.bn.running_var))
        return mean, (variance + vae.config.batch_norm_eps).sqrt()


_MODULES = transformer_module(
    r".*\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out|linear_in|linear_out|to_qkv_mlp_proj)"
    r"|single_transformer_blocks\.\d+\.attn\.to_out"
)

FAMILY = Family(
    name="flux2_klein",
    modules=_MODULES,
    tasks=("t2i", "i2i", "mixed"),
    sources=Flux2Klein.sources,
    saved_as=("Flux2KleinPipeline",),
    load=lambda path, config: load_pipeline("Flux2KleinPipeline", path, config),
    build=Model.builder(Flux2Klein, _MODULES),
    options=Flux2KleinOptions,
)
