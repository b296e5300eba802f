"""What a flow-matching generator must offer for the generic flow policy, and parts that families share.

Shapes: N records (*entries* of the conditions), b rows, C x h x w latents of one image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle
from torch.nn.utils.rnn import pad_sequence

from visual_grpo.common.types import PromptRecord

C = TypeVar("C")

Velocity = Callable[[Tensor, float], Tensor]
"""(state [b, C, h, w] float32, timestep) -> guided velocity [b, C, h, w] float32, with gradient where it is on."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """n denoising steps of the pipeline's scheduler."""

    timesteps: tuple[float, ...]
    """n of them, as the transformer is called with at each step."""
    sigmas: tuple[float, ...]
    """n + 1 noise levels, the first at most 1, the last 0."""

    @classmethod
    def of(cls, scheduler: Any) -> Schedule:
        """What a scheduler of diffusers was set to."""
        return cls(timesteps=tuple(scheduler.timesteps.tolist()), sigmas=tuple(scheduler.sigmas.tolist()))

    def __len__(self) -> int:
        return len(self.timesteps)


class FlowModel(Protocol[C]):
    """A pipeline at one image size. ``C`` is what its transformer is told of N records."""

    @property
    def transformer(self) -> Any:
        """The diffusers model that the LoRA adapter is on."""
        ...

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(C, h, w) of one image."""
        ...

    def schedule(self, steps: int) -> Schedule: ...

    def conditions(self, records: Sequence[PromptRecord], seeds: Sequence[int], guidance_scale: float) -> C:
        """What the transformer is told of N records.

        ``seeds``: [N], for a model that samples a part of it (GLM-Image's tokens). ``guidance_scale``: 1 = off.
        """
        ...

    def velocity(self, conditions: C, entries: Tensor) -> Velocity:
        """The velocity field of b rows; ``entries`` ([b] int64) says which of the N records each row belongs to.

        What all steps share, such as the embeddings of these rows, is prepared once here.
        """
        ...

    def pixels(self, latents: Tensor) -> list[Tensor]:
        """[b, C, h, w] float32 -> b uint8 images [3, H, W] on the CPU.

        On a CPU several threads call it at the same time.
        """
        ...


def latent_shape(pipeline: Any, size: tuple[int, int], channels: int) -> tuple[int, int, int]:
    """(C, h, w) of an image of ``size`` (height, width) in pixels."""
    return channels, size[0] // pipeline.vae_scale_factor, size[1] // pipeline.vae_scale_factor


def as_images(decoded: Tensor) -> list[Tensor]:
    """What a VAE decodes to, [b, 3, H, W] with values from -1 to 1, as b uint8 images [3, H, W] on the CPU."""
    return list(((decoded.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).cpu().contiguous())


def guided(
    conditional: Tensor, unconditional: Callable[[], Tensor], scale: float, *, both_branches: bool = False
) -> Tensor:
    """The velocity that is ``scale`` times as far from the unconditional one; 1 = off.

    The unconditional branch runs without gradient: guidance weighs it with a constant, and its gradient would train
    what inference only pushes away from. ``both_branches`` trains through it all the same.
    """
    if scale <= 1:
        return conditional
    with torch.set_grad_enabled(torch.is_grad_enabled() and both_branches):
        away_from = unconditional()
    return away_from + scale * (conditional - away_from)


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
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=embeds.device)
        mask = torch.arange(embeds.shape[1], device=embeds.device) < lengths[:, None]
        return cls(embeds=embeds, mask=None if mask.all() else mask)

    def rows(self, entries: Tensor) -> PaddedText:
        """Of ``entries`` ([b] int64), with all the padding: a row's velocity must not depend on its neighbours."""
        return PaddedText(embeds=self.embeds[entries], mask=None if self.mask is None else self.mask[entries])


class PooledText(NamedTuple):
    embeds: Tensor
    """[N, L, D]."""
    pooled: Tensor
    """[N, P]."""

    @classmethod
    def of(cls, prompts: Sequence[PooledText]) -> PooledText:
        """Several as one."""
        return cls(torch.cat([prompt.embeds for prompt in prompts]), torch.cat([prompt.pooled for prompt in prompts]))

    def rows(self, entries: Tensor) -> PooledText:
        """Of ``entries`` ([b] int64)."""
        return PooledText(self.embeds[entries], self.pooled[entries])


def packed(latents: Tensor) -> Tensor:
    """[b, C, h, w] -> [b, T, 4 C]."""
    return pixel_unshuffle(latents, 2).flatten(2).transpose(1, 2)


def unpacked(tokens: Tensor, height: int) -> Tensor:
    """[b, T, 4 C] -> [b, C, h, w], where h is ``height``."""
    return pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (height // 2, -1)), 2)


def packed_schedule(scheduler: Any, steps: int, latent_shape: tuple[int, int, int]) -> Schedule:
    """The pipelines' own: noise levels shifted by the number of image tokens (arXiv 2403.03206, section 5.3.2)."""
    config, (_, h, w) = scheduler.config, latent_shape
    slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    offset = config.base_shift - slope * config.base_image_seq_len
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps), mu=h * w // 4 * slope + offset)
    return Schedule.of(scheduler)
