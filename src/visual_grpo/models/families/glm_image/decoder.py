"""GLM-Image's second stage as a flow model: the DiT's velocities at the pipeline's own schedule, then the VAE.

`GlmImagePipeline.__call__` does the same without gradient and for the ODE only; a test checks that both match.
Shapes: N entries, b rows, C x h x w latents of one image, H x W its pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from diffusers.pipelines.glm_image.pipeline_glm_image import calculate_shift, retrieve_timesteps
from torch import Tensor

from visual_grpo.common.types import PromptRecord
from visual_grpo.models.families.glm_image.source_images import SourceCache, SourceEncoder, upsampled, write_sources
from visual_grpo.models.flow.flow_model import Schedule, Velocity
from visual_grpo.models.flow.parts import as_images, guided, latent_shape
from visual_grpo.models.rows import distinct

if TYPE_CHECKING:
    from diffusers import GlmImagePipeline, GlmImageTransformer2DModel
    from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache

SampleTokens = Callable[[Sequence[PromptRecord], Sequence[int]], Tensor]
"""(N records, seeds) -> [N, rows, columns] int64 image tokens of the AR module."""


@dataclass(frozen=True, kw_only=True)
class DecoderConditions:
    """The DiT's inputs for N entries; stored with a trajectory, since the replay needs the same ones."""

    glyphs: Sequence[Tensor]
    """Embeddings [1, L, D] of the quoted text, one of each distinct prompt (with its sources)."""
    no_glyphs: Tensor
    """[1, L, D] of a prompt without quoted text: what the unconditional branch gets."""
    prompt_of_entry: Tensor
    """[N] int64, entry -> index among the glyphs."""
    tokens: Tensor
    """[N, h * w / 4] int64: image tokens, each repeated twice in height and width."""
    guidance_scale: float
    """Classifier-free guidance; 1 = off."""
    source_latents: Sequence[Tensor] = ()
    """For edits: K tensors [prompts, C, h, w] float32, one row for each distinct prompt."""
    source_tokens: Sequence[Tensor] = ()
    """For edits: K tensors [prompts, h * w / 4] int64, like ``tokens``."""
    noise_of_entry: Tensor | None = None
    """[N] int64: entries with the same number start from the same noise; None = no shared first step."""


class GlmImageDecoder:
    """A ``FlowModel[DecoderConditions]``; the LoRA adapter of the DiT is active."""

    def __init__(
        self,
        pipeline: GlmImagePipeline,
        size: tuple[int, int],
        sources: SourceEncoder,
        sample_tokens: SampleTokens,
    ) -> None:
        """``sample_tokens``: the first stage."""
        self.pipeline, self.size, self.sources, self.sample_tokens = pipeline, size, sources, sample_tokens
        self.latent_shape = latent_shape(pipeline, size, pipeline.transformer.config.in_channels)
        self._rotary_kept: tuple[Tensor, Tensor] | None = None

    @property
    def transformer(self) -> GlmImageTransformer2DModel:
        return self.pipeline.transformer

    def schedule(self, steps: int) -> Schedule:
        """The pipeline's: integer timesteps, sigmas shifted by the number of image tokens."""
        scheduler = self.pipeline.scheduler
        _, rows, columns = self.latent_shape
        config = scheduler.config
        timesteps = np.linspace(config.num_train_timesteps, 1.0, steps + 1)[:-1].astype(np.int64).astype(np.float32)
        shift = calculate_shift(
            rows * columns // self.transformer.config.patch_size**2,
            config.get("base_image_seq_len", 256),
            config.get("base_shift", 0.25),
            config.get("max_shift", 0.75),
        )
        sigmas = timesteps / config.num_train_timesteps
        retrieve_timesteps(scheduler, steps, None, timesteps, sigmas, mu=shift)
        return Schedule.of(scheduler)

    @torch.no_grad()
    def conditions(
        self, records: Sequence[PromptRecord], seeds: Sequence[int], guidance_scale: float
    ) -> DecoderConditions:
        """Returns conditions with the tokens that the AR module samples with ``seeds``."""
        return self.conditions_of(records, self.sample_tokens(records, seeds), guidance_scale)

    @torch.no_grad()
    def conditions_of(
        self,
        records: Sequence[PromptRecord],
        tokens: Tensor,
        guidance_scale: float,
        noise_seeds: Sequence[int] | None = None,
    ) -> DecoderConditions:
        """Returns conditions with these image tokens, [N, rows, columns] int64, one for every 32 x 32 pixels.

        ``noise_seeds``: [N], of the noise that the denoising will start from. Where some are equal, the unconditional
        branch of its first step is computed once for each.
        """
        firsts, prompt_of_entry = distinct(records)
        columns = list(zip(*self.sources.of(firsts), strict=True))  # K tuples with a source of each distinct prompt
        return DecoderConditions(
            glyphs=[self._glyphs(record.prompt) for record in firsts],
            no_glyphs=self._glyphs(""),
            prompt_of_entry=prompt_of_entry,
            tokens=upsampled(tokens),
            guidance_scale=guidance_scale,
            source_latents=[torch.stack([source.latents for source in column]) for column in columns],
            source_tokens=[upsampled(torch.stack([source.tokens for source in column])) for column in columns],
            noise_of_entry=None if noise_seeds is None else torch.tensor(noise_seeds),
        )

    def velocity(self, conditions: DecoderConditions, entries: Tensor) -> Velocity:
        sources = self._written_sources(conditions, entries)

        def field(state: Tensor, timestep: float) -> Tensor:
            return guided(
                self._conditional(state, timestep, conditions, entries, sources),
                lambda: self._unconditional(state, timestep, conditions, entries),
                conditions.guidance_scale,
            )

        return field

    def pixels(self, latents: Tensor) -> list[Tensor]:
        """[b, C, h, w] -> b uint8 images [3, H, W] on the CPU."""
        vae = self.pipeline.vae
        mean = torch.tensor(vae.config.latents_mean, device=latents.device).view(1, -1, 1, 1)
        std = torch.tensor(vae.config.latents_std, device=latents.device).view(1, -1, 1, 1)
        scaled = (latents * std + mean).to(vae.dtype).contiguous(memory_format=torch.channels_last)
        return as_images(vae.decode(scaled, return_dict=False)[0])

    def _written_sources(self, conditions: DecoderConditions, entries: Tensor) -> SourceCache | None:
        """Keys and values of the rows' source images under the present weights, with gradient where it is on; None
        without sources."""
        if not conditions.source_latents:
            return None
        transformer = self.transformer
        used, inverse = conditions.prompt_of_entry[entries].unique(return_inverse=True)
        latents = [latents[used].to(transformer.device, transformer.dtype) for latents in conditions.source_latents]
        tokens = [tokens[used].to(transformer.device) for tokens in conditions.source_tokens]
        written = write_sources(transformer, latents, tokens, conditions.no_glyphs.shape[-1])
        return SourceCache(
            keys=tuple(k[inverse] for k in written.keys), values=tuple(v[inverse] for v in written.values)
        )

    def _conditional(
        self,
        state: Tensor,
        timestep: float,
        conditions: DecoderConditions,
        entries: Tensor,
        sources: SourceCache | None,
    ) -> Tensor:
        """A forward for each length of the rows' glyph embeddings."""
        groups = list(_rows_by_glyph_length(conditions, entries))
        parts = []
        for group in groups:
            own = entries[group]
            glyphs = torch.cat([conditions.glyphs[i] for i in conditions.prompt_of_entry[own].tolist()])
            read = None if sources is None else sources.select(group)
            tokens = conditions.tokens[own]
            parts.append(self._forward(state[group], timestep, glyphs, tokens, dropped=False, sources=read))
        return parts[0] if len(parts) == 1 else torch.cat(parts)[torch.cat(groups).argsort()]

    def _unconditional(self, state: Tensor, timestep: float, conditions: DecoderConditions, entries: Tensor) -> Tensor:
        """It depends on the state alone, and the first state is the noise: once for each noise there."""
        of_row = None
        if conditions.noise_of_entry is not None and timestep == self.pipeline.scheduler.config.num_train_timesteps:
            noises, of_row = conditions.noise_of_entry[entries].unique(return_inverse=True)
            rows = torch.stack([(of_row == noise).nonzero()[0, 0] for noise in range(len(noises))])
            state, entries = state[rows], entries[rows]
        no_glyphs = conditions.no_glyphs.expand(len(entries), -1, -1)
        velocity = self._forward(state, timestep, no_glyphs, conditions.tokens[entries], dropped=True)
        return velocity if of_row is None else velocity[of_row]

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
        transformer = self.transformer
        velocity: Tensor = transformer(
            hidden_states=state.to(transformer.dtype),
            encoder_hidden_states=glyphs,
            prior_token_id=tokens,
            # One answer for all tokens, on the host: a mask on a GPU would make the host wait for it.
            prior_token_drop=torch.tensor(dropped),
            # The pipeline, too, passes timesteps minus one.
            timestep=torch.full((len(state),), timestep - 1, device=state.device),
            target_size=torch.tensor([self.size], dtype=glyphs.dtype, device=state.device).expand(len(state), -1),
            crop_coords=torch.zeros(len(state), 2, dtype=glyphs.dtype, device=state.device),
            return_dict=False,
            kv_caches=sources,
            image_rotary_emb=self._rotary(state),
        )[0]
        return velocity.float()

    def _rotary(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the tables of the one image size, kept: the DiT would make them on the CPU at every forward."""
        if self._rotary_kept is None or self._rotary_kept[0].device != state.device:
            cosines, sines = self.transformer.rope(state)
            self._rotary_kept = cosines.to(state.device), sines.to(state.device)
        return self._rotary_kept

    def _glyphs(self, prompt: str) -> Tensor:
        embedding: Tensor = self.pipeline.encode_prompt(prompt, do_classifier_free_guidance=False)[0]
        return embedding


def _rows_by_glyph_length(conditions: DecoderConditions, entries: Tensor) -> Iterator[Tensor]:
    """Row numbers ([g] int64) of each glyph length.

    The pipeline left-pads glyph embeddings of a batch without a mask, so a prompt's image would depend on its
    neighbours' quoted texts; batches of one length need no padding.
    """
    lengths = torch.tensor([glyphs.shape[1] for glyphs in conditions.glyphs])[conditions.prompt_of_entry[entries]]
    for length in lengths.unique():
        yield (lengths == length).nonzero()[:, 0]
