"""The parameters of a pretraining. Imports no heavy libraries, because it is sent to other processes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visual_grpo.config import Task, World
from visual_grpo.files import fresh_folder, heal

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


_STAMP = "starter.json"


def digest_of(facts: Mapping[str, Any]) -> str:
    """A hex digest of what a folder's content depends on."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def is_current(folder: Path, digest: str) -> bool:
    """Whether ``folder`` was written for this digest."""
    heal(folder)
    stamp = folder / _STAMP
    return stamp.is_file() and json.loads(stamp.read_text(encoding="utf-8"))["digest"] == digest


@contextmanager
def whole_folder(folder: Path, digest: str) -> Iterator[Path]:
    """Gives an empty folder beside ``folder``, which it replaces when the block ends without an error."""
    with fresh_folder(folder) as fresh:
        yield fresh
        (fresh / _STAMP).write_text(json.dumps({"digest": digest}), encoding="utf-8")
