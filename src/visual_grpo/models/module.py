"""The trained parts of a model, and the settings that it is built with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from visual_grpo.config import PolicyConfig

if TYPE_CHECKING:
    from visual_grpo.models.lora import Adapter

Kind = Literal["tokens", "flow"]
"""A module's decisions: generated tokens, or stochastic denoising steps."""


@dataclass(frozen=True, kw_only=True)
class Module:
    """A part of a model that can be trained."""

    kind: Kind
    adapter: type[Adapter]
    """Attaches and saves its LoRA."""
    targets: str | list[str]
    """peft's target_modules: the matrices that get a LoRA where the parameters name none."""
    advice: str
    """Shown if the signal check stops a run: what to change for this module."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Arguments of `Family.build`."""

    size: tuple[int, int]
    """(height, width) in pixels."""
    frames: int | None = None
    """Frames of a video; None = images."""
    fps: float = 16.0
    """Frames per second of a video."""
    policy: PolicyConfig
    options: Any
    """The family's own options, an instance of `Family.options`."""
