"""Folders that are written whole or not at all, and that know what they were made from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from visual_grpo.files import fresh_folder, heal

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
