"""What a flow-matching generator must offer so that the generic flow policy can sample, replay and train it.

Shapes: N records (*entries* of the conditions), b rows, C x h x w latents of one image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from visual_grpo.types import PromptRecord

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
