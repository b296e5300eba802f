"""Declares what a family of flow models offers: a schedule, conditions, a velocity field and pixels.

Shapes: N prompts (*entries* of the conditions), b rows, C x h x w latents of one image; where the model generates
videos, C x f x h x w latents of f latent frames stand in their place, in all of this package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord, Sample

C = TypeVar("C")

Velocity = Callable[[Tensor, float], Tensor]
"""(state [b, C, h, w] float32, timestep) -> guided velocity [b, C, h, w] float32, with gradient where it is on."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """n denoising steps of the pipeline's scheduler."""

    timesteps: tuple[float, ...]
    """n values, as the transformer takes them."""
    sigmas: tuple[float, ...]
    """n + 1 noise levels, the first at most 1, the last 0."""

    @classmethod
    def of(cls, scheduler: Any) -> Schedule:
        """Reads a scheduler of diffusers after its ``set_timesteps``.

        Raises UserError for a number of steps that it has no noise levels for.
        """
        timesteps, sigmas = tuple(scheduler.timesteps.tolist()), tuple(scheduler.sigmas.tolist())
        if not all(map(math.isfinite, sigmas)):  # diffusers divides 0 by 0.
            raise UserError(
                f"The steps of a sampler are {len(timesteps)}, and this model's scheduler, which ends at a noise level"
                " above 0 (shift_terminal), needs at least 2. Raise the steps, such as sampling.eval.steps."
            )
        return cls(timesteps=timesteps, sigmas=sigmas)

    def __len__(self) -> int:
        return len(self.timesteps)


class FlowModel(Protocol[C]):
    """A pipeline at one image size. ``C`` are its transformer's conditions for N records."""

    @property
    def transformer(self) -> Any:
        """The diffusers model that the LoRA adapter is on."""
        ...

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """(C, h, w) of one image, (C, f, h, w) of one video."""
        ...

    def schedule(self, steps: int) -> Schedule: ...

    def conditions(self, records: Sequence[PromptRecord], seeds: Sequence[int], guidance_scale: float) -> C:
        """Encodes N records for the transformer.

        ``seeds``: [N], for a model that samples conditions (GLM-Image's tokens). ``guidance_scale``: 1 = off.
        """
        ...

    def velocity(self, conditions: C, entries: Tensor) -> Velocity:
        """Returns the velocity field of b rows, each with one of the N ``entries`` ([b] int64).

        Prepares here, once, what all steps share, such as the rows' embeddings.
        """
        ...

    def pixels(self, latents: Tensor) -> Sequence[Sample]:
        """[b, C, h, w] float32 -> b uint8 images [3, H, W], or videos, on the CPU; must be thread-safe."""
        ...
