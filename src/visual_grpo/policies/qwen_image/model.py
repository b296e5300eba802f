"""Qwen-Image and Qwen-Image-Edit as a `FlowModel`.

Their pipelines' ``__call__`` do the same for the ODE and without gradient; tests hold them equal.
Shapes: N prompts, b rows, C x h x w latents of one image, of which the transformer reads T = h w / 4 tokens of width
4 C; L text tokens of width D.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from visual_grpo.config import Strict
from visual_grpo.errors import UserError
from visual_grpo.policies.flow_model import Schedule, Velocity
from visual_grpo.policies.qwen_image.edit import SourceEncoder
from visual_grpo.policies.rows import distinct
from visual_grpo.types import PromptRecord

if TYPE_CHECKING:
    from diffusers import QwenImageEditPipeline, QwenImagePipeline
    from PIL.Image import Image


class QwenImageOptions(Strict):
    """How prompts are read and guidance is trained."""

    negative_prompt: str = Field(" ", description="what guidance steers away from")
    max_sequence_length: int = Field(512, ge=1, le=1024, description="text tokens of a prompt; edits are not cut")
    unconditional_gradient: bool = Field(True, description="train through both branches of the guidance")


@dataclass(frozen=True, kw_only=True)
class Text:
    """Encoded prompts, padded to the longest."""

    embeds: Tensor
    """[N, L, D]."""
    mask: Tensor | None
    """[N, L] bool, True = a token of the prompt; None where nothing is padded."""

    @classmethod
    def padded(cls, prompts: Sequence[Tensor]) -> Text:
        """``prompts``: N of [length, D]."""
        embeds = pad_sequence(list(prompts), batch_first=True)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=embeds.device)
        mask = torch.arange(embeds.shape[1], device=embeds.device) < lengths[:, None]
        return cls(embeds=embeds, mask=None if mask.all() else mask)

    def rows(self, entries: Tensor) -> Text:
        """Keeps the padding, which rounds: a row has the same velocity in every batch."""
        return Text(embeds=self.embeds[entries], mask=None if self.mask is None else self.mask[entries])


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What the transformer is told."""

    prompts: Text
    negative: Text | None
    """Of N entries too, since an edit's text has its source image in it; None without guidance."""
    sources: Tensor | None
    """Of edits: [N, S, 4 C] source images as tokens."""
    guidance_scale: float


class QwenImage:
    """A pipeline at one size."""

    def __init__(
        self, pipeline: QwenImagePipeline | QwenImageEditPipeline, size: tuple[int, int], options: QwenImageOptions
    ) -> None:
        """``size``: (height, width) in pixels, multiples of 16."""
        self.pipeline, self.transformer, self.options = pipeline, pipeline.transformer, options
        factor = pipeline.vae_scale_factor
        self.latent_shape = (self.transformer.config.in_channels // 4, size[0] // factor, size[1] // factor)
        self.sources = SourceEncoder(pipeline, size) if hasattr(pipeline, "processor") else None
        self._decoding = threading.Lock()

    def schedule(self, steps: int) -> Schedule:
        """The pipeline's: shifted by the number of image tokens."""
        from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

        scheduler, (_, h, w) = self.pipeline.scheduler, self.latent_shape
        names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
        shift = calculate_shift(h * w // 4, *(scheduler.config[name] for name in names))
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps), mu=shift)
        return Schedule(timesteps=tuple(scheduler.timesteps.tolist()), sigmas=tuple(scheduler.sigmas.tolist()))

    @torch.no_grad()
    def conditions(self, records: Sequence[PromptRecord], seeds: Sequence[int], guidance_scale: float) -> Conditions:
        """Of N records; nothing is sampled, so ``seeds`` are not used."""
        self._check(records)
        firsts, prompt_of_entry = distinct(records)
        images = [self.sources.image(record) for record in firsts] if self.sources else []

        def encoded(prompts: Sequence[str]) -> Text:
            texts = [self._encode(prompt, images[i : i + 1]) for i, prompt in enumerate(prompts)]
            return Text.padded(texts).rows(prompt_of_entry)

        return Conditions(
            prompts=encoded([record.prompt for record in firsts]),
            negative=encoded([self.options.negative_prompt] * len(firsts)) if guidance_scale > 1 else None,
            sources=self.sources.tokens(images)[prompt_of_entry] if self.sources else None,
            guidance_scale=guidance_scale,
        )

    def velocity(self, conditions: Conditions, entries: Tensor) -> Velocity:
        """Of the rows ``entries`` ([b] int64).

        Each token of the guided velocity is scaled to the norm of the conditional branch's.
        """
        prompts, scale = conditions.prompts.rows(entries), conditions.guidance_scale
        negative = None if conditions.negative is None else conditions.negative.rows(entries)
        sources = None if conditions.sources is None else conditions.sources[entries]

        def guided(state: Tensor, timestep: float) -> Tensor:
            tokens = F.pixel_unshuffle(state, 2).flatten(2).transpose(1, 2)
            velocity = self._forward(tokens, timestep, prompts, sources)
            if negative is not None:
                with torch.set_grad_enabled(torch.is_grad_enabled() and self.options.unconditional_gradient):
                    unconditional = self._forward(tokens, timestep, negative, sources)
                velocity = self._rescaled(unconditional + scale * (velocity - unconditional), velocity)
            grid = velocity.transpose(1, 2).unflatten(2, (state.shape[2] // 2, state.shape[3] // 2))
            return F.pixel_shuffle(grid, 2)

        return guided

    @torch.no_grad()
    def pixels(self, latents: Tensor) -> list[Tensor]:
        """[b, C, h, w] -> b uint8 images [3, H, W] on the CPU."""
        vae = self.pipeline.vae
        mean, std = (
            torch.tensor(values, device=latents.device).view(-1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        latents = latents[:, :, None] / (1 / std) + mean
        with self._decoding:  # The VAE keeps features between its calls: two at a time would mix them up.
            images = vae.decode(latents.to(vae.dtype), return_dict=False)[0][:, :, 0].float()
        return list(((images / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).cpu().contiguous())

    def _encode(self, prompt: str, image: list[Image]) -> Tensor:
        """[length, D]. One prompt at a time: the same in any batch, and the encoder keeps every layer's output."""
        given = {"image": image} if image else {}
        length = self.options.max_sequence_length
        embeds: Tensor = self.pipeline.encode_prompt([prompt], max_sequence_length=length, **given)[0]
        return embeds[0]

    def _forward(self, tokens: Tensor, timestep: float, text: Text, sources: Tensor | None) -> Tensor:
        """[b, T, 4 C] float32."""
        dtype, (_, h, w) = self.transformer.dtype, self.latent_shape
        shapes, count = [(1, h // 2, w // 2)], tokens.shape[1]
        if self.sources is not None and sources is not None:
            shapes, tokens = [*shapes, self.sources.shape], torch.cat([tokens, sources.to(tokens)], 1)
        velocity: Tensor = self.transformer(
            hidden_states=tokens.to(dtype),
            timestep=torch.full((len(tokens),), timestep, dtype=dtype, device=tokens.device) / 1000,
            encoder_hidden_states=text.embeds,
            encoder_hidden_states_mask=text.mask,
            img_shapes=[shapes] * len(tokens),
            return_dict=False,
        )[0]
        return velocity[:, :count].float()

    def _rescaled(self, guided: Tensor, conditional: Tensor) -> Tensor:
        ratio = conditional.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)
        return guided * (ratio if self.options.unconditional_gradient else ratio.detach())

    def _check(self, records: Sequence[PromptRecord]) -> None:
        expected = 1 if self.sources else 0
        for record in records:
            if len(record.source_images) != expected:
                raise UserError(
                    f"the record {record.id!r} has {len(record.source_images)} source images; a"
                    f" {type(self.pipeline).__name__} takes {expected} of each record"
                )
