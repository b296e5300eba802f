"""The parameters of a pretraining. Imports no heavy libraries, because it is sent to other processes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visual_grpo.common.files import fresh_folder, heal
from visual_grpo.config import Task

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
    steps: Mapping[str, int]
    """Optimiser steps by module."""


_STAMP = "starter.json"


def digest_of(facts: Mapping[str, Any]) -> str:
    """A hex digest of what a folder's content depends on."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def write_once(folder: Path, facts: Mapping[str, Any], write: Callable[[Path], None]) -> str:
    """Replaces ``folder`` by one that ``write`` fills, unless it was written for the same facts; returns their digest.

    After an error or an interruption the folder is as it was.
    """
    digest = digest_of(facts)
    heal(folder)
    stamp = folder / _STAMP
    if not stamp.is_file() or json.loads(stamp.read_text(encoding="utf-8"))["digest"] != digest:
        with fresh_folder(folder) as fresh:
            write(fresh)
            (fresh / _STAMP).write_text(json.dumps({"digest": digest}), encoding="utf-8")
    return digest
