"""The parameters of a pretraining. Imports no heavy libraries, because it is sent to other processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from visual_grpo.config import Task, World

Advance = Callable[[str, int], None]
"""Called with the name of a module (``vae``, ``dit``, ``ar``, ``vl``) and the number of its completed steps."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that the weights depend on, and where they are saved."""

    folder: Path
    """Each trained module is saved to a subfolder."""
    height: int
    """Pixels, a multiple of 32, like ``width``."""
    width: int
    seed: int
    task: Task = "t2i"
    """Whether the model learns prompts, edits or both."""
    vae_steps: int
    dit_steps: int
    ar_steps: int
    world: World = "shapes"
    """Which pictures the model learns to draw."""
