"""Parts that families of flow models share: latent shapes, guidance, prompts in a batch, packed latents, LoRA targets.

Shapes: N prompts, b rows, C x h x w latents of one image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle
from torch.nn.utils.rnn import pad_sequence

from visual_grpo.common.types import PromptRecord, VideoSample
from visual_grpo.models.flow.flow_model import Schedule, Velocity
from visual_grpo.models.flow.references import require_sources
from visual_grpo.models.lora import PipelineAdapter
from visual_grpo.models.module import Module
from visual_grpo.models.rows import distinct

T = TypeVar("T")
R = TypeVar("R")
Text = TypeVar("Text", bound="tuple[Tensor, ...]")


def latent_shape(pipeline: Any, size: tuple[int, int], channels: int) -> tuple[int, int, int]:
    """(C, h, w) of an image of ``size`` (height, width) in pixels."""
    return channels, size[0] // pipeline.vae_scale_factor, size[1] // pipeline.vae_scale_factor


def as_images(decoded: Tensor) -> list[Tensor]:
    """Converts a VAE's output, [b, 3, H, W] from -1 to 1, to b uint8 images [3, H, W] on the CPU."""
    return list(((decoded.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).cpu().contiguous())


def as_videos(decoded: Tensor, fps: float) -> list[VideoSample]:
    """Converts a VAE's output, [b, 3, F, H, W] from -1 to 1, to b videos on the CPU."""
    return [VideoSample(frames=torch.stack(as_images(video.movedim(0, 1))), fps=fps) for video in decoded]


def decoded(vae: Any, latents: Tensor) -> list[Tensor]:
    """Decodes latents [b, C, h, w] by a VAE whose configuration has a scale and a shift, to images as `as_images`."""
    latents = latents / vae.config.scaling_factor + vae.config.shift_factor
    return as_images(vae.decode(latents.to(vae.dtype), return_dict=False)[0])


def guided(
    conditional: Tensor, unconditional: Callable[[], Tensor], scale: float, *, both_branches: bool = False
) -> Tensor:
    """Classifier-free guidance, ``u + scale * (c - u)`` (arXiv 2207.12598); 1 = off.

    The unconditional branch runs without gradient: guidance weighs it with a constant, and its gradient would train
    what inference only pushes away from. ``both_branches`` trains through it all the same.
    """
    if scale <= 1:
        return conditional
    with torch.set_grad_enabled(torch.is_grad_enabled() and both_branches):
        away_from = unconditional()
    return away_from + scale * (conditional - away_from)


@dataclass(frozen=True, kw_only=True)
class TextConditions(Generic[T]):
    """Conditions of a transformer for N prompts, each encoded by itself: the same in any batch."""

    prompts: Sequence[T]
    """N encoded prompts."""
    negative: T | None
    """The negative prompt; None without guidance."""
    guidance_scale: float
    references: Sequence[Any] = ()
    """The sources of N records, in the model's form: `References`, of a model that edits."""

    @classmethod
    def of(
        cls,
        records: Sequence[PromptRecord],
        encode: Callable[[str], T],
        negative: str | None,
        guidance_scale: float,
        references: Sequence[Any] = (),
    ) -> TextConditions[T]:
        """Encodes each distinct prompt once; a ``negative`` of None means that the model has no guidance.

        Raises UserError for records with sources where none were encoded.
        """
        if not references:
            require_sources(records, range(1))
        unique, index = distinct(records)
        texts = [encode(record.prompt) for record in unique]
        return cls(
            prompts=[texts[row] for row in index.tolist()],
            negative=encode(negative) if negative is not None and guidance_scale > 1 else None,
            guidance_scale=guidance_scale,
            references=references,
        )

    def rows(self, entries: Tensor) -> list[T]:
        """Selects the prompts of ``entries`` ([b] int64)."""
        return [self.prompts[entry] for entry in entries.tolist()]

    def velocity(
        self, forward: Callable[[Tensor, float, R], Tensor], join: Callable[[list[T]], R], entries: Tensor
    ) -> Velocity:
        """Returns the guided velocity of ``entries`` ([b] int64).

        ``forward(state, timestep, texts)`` runs the transformer; ``join`` makes a batch of b encoded prompts.
        """
        prompts = join(self.rows(entries))
        if self.negative is None:
            return lambda state, timestep: forward(state, timestep, prompts)
        negative = join([self.negative] * len(entries))
        return lambda state, timestep: guided(
            forward(state, timestep, prompts), lambda: forward(state, timestep, negative), self.guidance_scale
        )


def tokens_and_limit(prompt: str, *readers: tuple[Any, int]) -> tuple[int, int]:
    """Returns a prompt's tokens and how many are read, by the (tokenizer, limit) that leaves the fewest out."""
    counts = ((len(tokenizer(prompt).input_ids), limit) for tokenizer, limit in readers)
    return min(counts, key=lambda pair: pair[0] - pair[1])


@dataclass(frozen=True, kw_only=True)
class PaddedText:
    """Embeddings of N prompts and which of them are padding."""

    embeds: Tensor
    """[N, L, D]."""
    mask: Tensor | None
    """[N, L] bool, True = a token of the prompt; None where nothing is padded."""

    @classmethod
    def of(cls, prompts: Sequence[Tensor]) -> PaddedText:
        """``prompts``: N of [length, D]."""
        embeds = pad_sequence(list(prompts), batch_first=True)
        lengths = torch.tensor([len(prompt) for prompt in prompts]).to(embeds.device)
        mask = torch.arange(embeds.shape[1], device=embeds.device) < lengths[:, None]
        return cls(embeds=embeds, mask=None if mask.all() else mask)

    def rows(self, entries: Tensor) -> PaddedText:
        """Selects ``entries`` ([b] int64), with all padding: a row's velocity must not depend on its neighbours."""
        return PaddedText(embeds=self.embeds[entries], mask=None if self.mask is None else self.mask[entries])


class PooledText(NamedTuple):
    embeds: Tensor
    """[N, L, D]."""
    pooled: Tensor
    """[N, P]."""


class MaskedText(NamedTuple):
    embeds: Tensor
    """[N, L, D]."""
    mask: Tensor
    """[N, L] bool, True = a token of the prompt; the padding was encoded too, so that the length L matters."""


def concatenated(prompts: Sequence[Text]) -> Text:
    """Concatenates the encodings of prompts, field by field."""
    return type(prompts[0])(*map(torch.cat, zip(*prompts, strict=True)))


def packed(latents: Tensor) -> Tensor:
    """[b, C, h, w] -> [b, T, 4 C]."""
    return pixel_unshuffle(latents, 2).flatten(2).transpose(1, 2)


def unpacked(tokens: Tensor, height: int) -> Tensor:
    """[b, T, 4 C] -> [b, C, h, w], where h is ``height``."""
    return pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (height // 2, -1)), 2)


def shifted_schedule(scheduler: Any, steps: int, tokens: int) -> Schedule:
    """The pipelines' schedule: noise levels shifted by the number of image tokens (arXiv 2403.03206, section 5.3.2)."""
    with np.errstate(invalid="ignore"):  # `Schedule.of` refuses what is not a number.
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps), mu=shift_of(scheduler, tokens))
    return Schedule.of(scheduler)


def shift_of(scheduler: Any, tokens: int) -> float:
    """Returns the logarithm of the shift, linear in the number of image tokens."""
    config = scheduler.config
    slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    return float(config.base_shift + slope * (tokens - config.base_image_seq_len))


_ATTENTION = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
_ADVICE = (
    "a reward that sees what the early steps decide (layout, objects, text); policy.flow.noise between .4 and 1;"
    " policy.flow.window_start=0; policy.share_start_noise=true; more grpo.prompts_per_step"
)


def transformer_module(targets: str | list[str], adapter: type[PipelineAdapter] = PipelineAdapter) -> dict[str, Module]:
    """The one module of a pipeline; ``targets`` are peft's: the matrices that get a LoRA."""
    return {"dit": Module(kind="flow", adapter=adapter, targets=targets, advice=_ADVICE)}


def mmdit_modules(*feed_forwards: str) -> dict[str, Module]:
    """The module of a transformer with a stream for the image and one for the text (MMDiT, arXiv 2403.03206).

    ``feed_forwards``: what a block calls its feed-forward networks, such as ``ff`` and ``ff_context``.
    """
    layers = [f"{name}.net.{layer}" for name in feed_forwards for layer in ("0.proj", "2")]
    return transformer_module([*_ATTENTION, *layers])
