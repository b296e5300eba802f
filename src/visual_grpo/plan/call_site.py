"""Which source line asked for an operation."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

_PROJECT = "visual_grpo/"
_LIBRARIES = ("transformers/", "diffusers/", "peft/")


def call_site() -> str:
    """``policies/tokens.py:87``: the line of this project; with the line of a model library that it called, if any."""
    library = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        inside = _after(name, (_PROJECT,))
        if inside and f"{_PROJECT}plan/" not in name:
            return f"{inside}:{frame.f_lineno}" + (f" ({library})" if library else "")
        if not library and any(f"/{part}" in name for part in _LIBRARIES):
            library = f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return library or "autograd"


def _after(name: str, folders: tuple[str, ...]) -> str:
    for folder in folders:
        _, found, rest = name.rpartition(f"/src/{folder}")
        if found:
            return rest
    return ""
