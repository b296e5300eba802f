"""Stable Diffusion 3 and 3.5 as a `FlowModel`.

`StableDiffusion3Pipeline.__call__` does the same for the ODE and without gradient; a test holds the two equal.
Shapes: N prompts, b rows, C x h x w latents of one image, L text tokens of width D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from visual_grpo.config import Strict
from visual_grpo.policies.flow_model import Schedule, Velocity
from visual_grpo.policies.rows import distinct
from visual_grpo.types import PromptRecord

if TYPE_CHECKING:
    from diffusers import StableDiffusion3Pipeline


class Sd3Options(Strict):
    """What the text encoders are given."""

    max_sequence_length: int = Field(
        256, ge=0, le=512, description="T5 tokens of a prompt; 0 = only the two CLIPs, and T5 is not even loaded"
    )
    negative_prompt: str = Field("", description="what guidance steers away from")


class Text(NamedTuple):
    """Encoded prompts."""

    embeds: Tensor
    """[N, L, D], CLIP's tokens before T5's."""
    pooled: Tensor
    """[N, P], the two CLIPs'."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What the transformer is told."""

    prompts: Text
    negative: Text | None
    """Of one prompt, the same for all; None without guidance."""
    guidance_scale: float


class Sd3:
    """A pipeline at one size."""

    def __init__(self, pipeline: StableDiffusion3Pipeline, size: tuple[int, int], options: Sd3Options) -> None:
        """``size``: (height, width) in pixels, multiples of 16."""
        self.pipeline, self.transformer, self.options = pipeline, pipeline.transformer, options
        factor = pipeline.vae_scale_factor
        self.latent_shape = (self.transformer.config.in_channels, size[0] // factor, size[1] // factor)

    def schedule(self, steps: int) -> Schedule:
        """The pipeline's own, whose shift does not depend on the size."""
        scheduler = self.pipeline.scheduler
        scheduler.set_timesteps(steps)
        return Schedule(timesteps=tuple(scheduler.timesteps.tolist()), sigmas=tuple(scheduler.sigmas.tolist()))

    @torch.no_grad()
    def conditions(self, records: Sequence[PromptRecord], seeds: Sequence[int], guidance_scale: float) -> Conditions:
        """Of N records; nothing is sampled, so ``seeds`` are not used."""
        firsts, own = distinct(records)
        texts = [self._encode(record.prompt) for record in firsts]  # One at a time: the same in any batch.
        return Conditions(
            prompts=Text(*(torch.cat(part)[own] for part in zip(*texts, strict=True))),
            negative=self._encode(self.options.negative_prompt) if guidance_scale > 1 else None,
            guidance_scale=guidance_scale,
        )

    def velocity(self, conditions: Conditions, entries: Tensor) -> Velocity:
        """Of the rows ``entries`` ([b] int64).

        The unconditional branch runs without gradient: guidance weighs it with a constant, and its gradient would train
        what inference only pushes away from.
        """
        prompts, scale = Text(*(part[entries] for part in conditions.prompts)), conditions.guidance_scale
        if conditions.negative is None:
            return lambda state, timestep: self._forward(state, timestep, prompts)
        negative = Text(*(part.expand(len(entries), *part.shape[1:]) for part in conditions.negative))

        def guided(state: Tensor, timestep: float) -> Tensor:
            conditional = self._forward(state, timestep, prompts)
            with torch.no_grad():
                unconditional = self._forward(state, timestep, negative)
            return unconditional + scale * (conditional - unconditional)

        return guided

    @torch.no_grad()
    def pixels(self, latents: Tensor) -> list[Tensor]:
        """[b, C, h, w] -> b uint8 images [3, H, W] on the CPU."""
        vae = self.pipeline.vae
        latents = latents / vae.config.scaling_factor + vae.config.shift_factor
        images = vae.decode(latents.to(vae.dtype), return_dict=False)[0].float()
        return list(((images / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).cpu().contiguous())

    def _encode(self, prompt: str) -> Text:
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            prompt, None, None, do_classifier_free_guidance=False, max_sequence_length=self.options.max_sequence_length
        )
        return Text(embeds, pooled)

    def _forward(self, state: Tensor, timestep: float, text: Text) -> Tensor:
        velocity: Tensor = self.transformer(
            hidden_states=state.to(self.transformer.dtype),
            timestep=torch.full((len(state),), timestep, device=state.device),
            encoder_hidden_states=text.embeds,
            pooled_projections=text.pooled,
            return_dict=False,
        )[0]
        return velocity.float()
