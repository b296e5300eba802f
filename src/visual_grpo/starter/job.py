"""What a pretraining is asked to do. Light: it travels to other processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from visual_grpo.config import Task, World

Advance = Callable[[str, int], None]
"""Called with the name of a module (``vae``, ``dit``, ``ar``) and the number of its steps done."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that the weights depend on, and where they are saved."""

    folder: Path
    """Every trained module gets a folder of its own in here."""
    height: int
    """Pixels, a multiple of 32, like ``width``."""
    width: int
    seed: int
    task: Task = "t2i"
    """Which records the model learns to serve."""
    vae_steps: int
    dit_steps: int
    ar_steps: int
    world: World = "shapes"
    """Which pictures are drawn and learnt."""
