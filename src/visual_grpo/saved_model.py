"""Checks the location of a saved model: a folder, or an id on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path


def is_whole(path: str, file: str) -> bool:
    """True for a folder that contains ``file``, and for anything that can be a model id on the hub."""
    can_be_id = path.count("/") <= 1 and not path.startswith((".", "/", "~")) and not Path(path).exists()
    return can_be_id or (Path(path) / file).is_file()
