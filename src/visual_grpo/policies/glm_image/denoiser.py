"""The way from prior tokens to pixels: the DiT's velocities at the pipeline's own schedule, then the VAE.

`GlmImagePipeline.__call__` does the same without gradient and for the ODE only; a test holds the two equal.
Shapes: B rows, C x h x w latents of one image, H x W its pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from visual_grpo.hardware.parallel import map_on_cores
from visual_grpo.policies.flow_sde import ode_step
from visual_grpo.policies.glm_image.source_cache import SourceCache, upsampled, write_sources
from visual_grpo.policies.glm_image.sources import SourceEncoder, distinct
from visual_grpo.types import PromptRecord

if TYPE_CHECKING:
    from diffusers import GlmImagePipeline
    from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """n denoising steps of the pipeline's scheduler."""

    timesteps: tuple[float, ...]
    """n of them, 1000 first, before the shift that the sigmas have."""
    sigmas: tuple[float, ...]
    """n + 1 of them, 1 first and 0 last."""

    def __len__(self) -> int:
        return len(self.timesteps)


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What the DiT is told of B rows; kept with a trajectory, since a replay must be told the same."""

    glyphs: Sequence[Tensor]
    """N embeddings [1, L, D] of the quoted text, one of each distinct prompt (with its sources)."""
    no_glyphs: Tensor
    """[1, L, D] of a prompt without quoted text: what the unconditional branch gets."""
    prompt_of_row: Tensor
    """[B] int64, row -> index among the glyphs."""
    tokens: Tensor
    """[B, h * w / 4] int64: prior tokens, each twice as high and wide as it was generated."""
    guidance_scale: float
    """Classifier-free guidance; 1 = off."""
    source_latents: Sequence[Tensor] = ()
    """Of edits: K tensors [N, C, h, w] float32, one row for each of N distinct prompts."""
    source_tokens: Sequence[Tensor] = ()
    """Of edits: K tensors [N, h * w / 4] int64, like ``tokens``."""

    def __len__(self) -> int:
        return len(self.tokens)


class Denoiser:
    """Velocities, ODE and pixels of one pipeline at one size; an adapter injected into the DiT takes part."""

    def __init__(
        self,
        pipeline: GlmImagePipeline,
        size: tuple[int, int],
        sources: SourceEncoder,
        *,
        denoise_batch: int,
        decode_batch: int,
    ) -> None:
        """
        Args:
            size: (height, width) in pixels, multiples of 32.
            sources: encodes the source images of edits.
            denoise_batch, decode_batch: images that the DiT denoises, and the VAE decodes, at a time without gradient;
                on a CPU every core takes such a batch.
        """
        self.pipeline, self.size, self.sources = pipeline, size, sources
        self.denoise_batch, self.decode_batch = denoise_batch, decode_batch
        factor = pipeline.vae_scale_factor
        self.latent_shape = (pipeline.transformer.config.in_channels, size[0] // factor, size[1] // factor)

    def schedule(self, steps: int) -> Schedule:
        """The pipeline's: integer timesteps, sigmas shifted by the number of image tokens."""
        from diffusers.pipelines.glm_image.pipeline_glm_image import calculate_shift, retrieve_timesteps

        scheduler = self.pipeline.scheduler
        _, rows, columns = self.latent_shape
        config = scheduler.config
        timesteps = np.linspace(config.num_train_timesteps, 1.0, steps + 1)[:-1].astype(np.int64).astype(np.float32)
        shift = calculate_shift(
            rows * columns // self.pipeline.transformer.config.patch_size**2,
            config.get("base_image_seq_len", 256),
            config.get("base_shift", 0.25),
            config.get("max_shift", 0.75),
        )
        sigmas = timesteps / config.num_train_timesteps
        given, _ = retrieve_timesteps(scheduler, steps, None, timesteps, sigmas, mu=shift)
        return Schedule(timesteps=tuple(given.tolist()), sigmas=tuple(scheduler.sigmas.tolist()))

    @torch.no_grad()
    def conditions(self, records: Sequence[PromptRecord], tokens: Tensor, guidance_scale: float) -> Conditions:
        """Of B rows. ``tokens``: [B, rows, columns] int64, one for every 32 x 32 pixels."""
        firsts, prompt_of_row = distinct(records)
        columns = list(zip(*self.sources.of(firsts), strict=True))  # K tuples of N sources
        return Conditions(
            glyphs=[self._glyphs(record.prompt) for record in firsts],
            no_glyphs=self._glyphs(""),
            prompt_of_row=prompt_of_row,
            tokens=upsampled(tokens),
            guidance_scale=guidance_scale,
            source_latents=[torch.stack([source.latents for source in column]) for column in columns],
            source_tokens=[upsampled(torch.stack([source.tokens for source in column])) for column in columns],
        )

    def start_noise(self, seeds: Sequence[int]) -> Tensor:
        """[B, C, h, w] float32 on the CPU; row i is a function of ``seeds[i]``."""
        return torch.stack(
            [torch.randn(self.latent_shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        )

    def written_sources(self, conditions: Conditions, rows: Tensor) -> SourceCache | None:
        """Keys and values of the sources of ``rows`` ([b] int64) under the weights as they are, with gradient where it
        is on; None without sources."""
        if not conditions.source_latents:
            return None
        transformer = self.pipeline.transformer
        used, own = conditions.prompt_of_row[rows].unique(return_inverse=True)
        latents = [latents[used].to(transformer.device, transformer.dtype) for latents in conditions.source_latents]
        tokens = [tokens[used].to(transformer.device) for tokens in conditions.source_tokens]
        written = write_sources(transformer, latents, tokens, conditions.no_glyphs.shape[-1])
        return SourceCache(keys=tuple(k[own] for k in written.keys), values=tuple(v[own] for v in written.values))

    def velocity(
        self,
        state: Tensor,
        timestep: float,
        conditions: Conditions,
        rows: Tensor,
        sources: SourceCache | None = None,
    ) -> Tensor:
        """[b, C, h, w] float32 of ``rows`` ([b] int64) at ``state``, guided.

        ``sources``: what ``written_sources`` gave for the same rows under the present weights.

        The unconditional branch runs without gradient: guidance weighs it with a constant, and its gradient would
        train what inference only pushes away from.
        """
        parts = [
            (alike, self._velocity_alike(state, timestep, conditions, rows, alike, sources))
            for alike in _alike(conditions, rows)
        ]
        if len(parts) == 1:
            return parts[0][1]
        order = torch.cat([alike for alike, _ in parts]).argsort()
        return torch.cat([velocity for _, velocity in parts])[order]

    @torch.no_grad()
    def integrate(self, noise: Tensor, conditions: Conditions, steps: int) -> Tensor:
        """ODE from start noise to latents, [B, C, h, w] float32."""
        schedule = self.schedule(steps)
        rows = torch.arange(len(noise))
        return self.batched(noise, rows, lambda state, own: self.ode(state, conditions, own, schedule, range(steps)))

    def ode(self, state: Tensor, conditions: Conditions, rows: Tensor, schedule: Schedule, steps: range) -> Tensor:
        """The given ``steps`` of the schedule, [b, C, h, w] -> the same."""
        sources = self.written_sources(conditions, rows) if len(steps) else None
        for step in steps:
            velocity = self.velocity(state, schedule.timesteps[step], conditions, rows, sources)
            state = ode_step(velocity, state, schedule.sigmas[step], schedule.sigmas[step + 1])
        return state

    def batched(self, state: Tensor, rows: Tensor, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """``run(state, rows)`` for ``denoise_batch`` of ``rows`` ([b] int64) at a time, without gradient, joined."""
        device = self.pipeline.transformer.device
        parts = zip(state.to(device).split(self.denoise_batch), rows.split(self.denoise_batch), strict=True)
        return torch.cat(map_on_cores(lambda part: run(*part), parts, device))

    @torch.no_grad()
    def pixels(self, latents: Tensor) -> list[Tensor]:
        """[B, C, h, w] -> B uint8 images [3, H, W] on the CPU."""
        vae = self.pipeline.vae
        mean = torch.tensor(vae.config.latents_mean, device=latents.device).view(1, -1, 1, 1)
        std = torch.tensor(vae.config.latents_std, device=latents.device).view(1, -1, 1, 1)

        def decoded(part: Tensor) -> list[Tensor]:
            part = part.to(vae.dtype).contiguous(memory_format=torch.channels_last)
            image = vae.decode(part, return_dict=False)[0].float()
            return list(((image / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).cpu().contiguous())

        parts = map_on_cores(decoded, (latents * std + mean).split(self.decode_batch), latents.device)
        return [image for part in parts for image in part]

    def _velocity_alike(
        self,
        state: Tensor,
        timestep: float,
        conditions: Conditions,
        rows: Tensor,
        alike: Tensor,
        sources: SourceCache | None,
    ) -> Tensor:
        """Of the positions ``alike`` in ``rows``, which have one glyph length."""
        state, rows = state[alike], rows[alike]
        glyphs = torch.cat([conditions.glyphs[i] for i in conditions.prompt_of_row[rows].tolist()])
        tokens = conditions.tokens[rows]
        read = None if sources is None else sources.select(alike)
        conditional = self._forward(state, timestep, glyphs, tokens, dropped=False, sources=read)
        if conditions.guidance_scale <= 1:
            return conditional
        with torch.no_grad():
            no_glyphs = conditions.no_glyphs.expand(len(rows), -1, -1)
            unconditional = self._forward(state, timestep, no_glyphs, tokens, dropped=True)
        return unconditional + conditions.guidance_scale * (conditional - unconditional)

    def _forward(
        self,
        state: Tensor,
        timestep: float,
        glyphs: Tensor,
        tokens: Tensor,
        *,
        dropped: bool,
        sources: GlmImageKVCache | None = None,
    ) -> Tensor:
        transformer = self.pipeline.transformer
        velocity: Tensor = transformer(
            hidden_states=state.to(transformer.dtype),
            encoder_hidden_states=glyphs,
            prior_token_id=tokens,
            prior_token_drop=torch.full_like(tokens, dropped, dtype=torch.bool),
            # The pipeline, too, passes timesteps less one.
            timestep=torch.full((len(state),), timestep - 1, device=state.device),
            target_size=torch.tensor([self.size], dtype=glyphs.dtype, device=state.device).expand(len(state), -1),
            crop_coords=torch.zeros(len(state), 2, dtype=glyphs.dtype, device=state.device),
            return_dict=False,
            kv_caches=sources,
        )[0]
        return velocity.float()

    def _glyphs(self, prompt: str) -> Tensor:
        embedding: Tensor = self.pipeline.encode_prompt(prompt, do_classifier_free_guidance=False)[0]
        return embedding


def _alike(conditions: Conditions, rows: Tensor) -> Iterator[Tensor]:
    """Positions in ``rows`` of each glyph length.

    The pipeline left-pads glyph embeddings of a batch without a mask, so a prompt's image would depend on its
    neighbours' quoted texts; batches of one length need no padding.
    """
    lengths = torch.tensor([glyphs.shape[1] for glyphs in conditions.glyphs])[conditions.prompt_of_row[rows]]
    for length in lengths.unique():
        yield (lengths == length).nonzero()[:, 0]
