"""Where a saved model may be: a folder, or an id on the model hub."""

from __future__ import annotations

from pathlib import Path


def may_be_hub_id(path: str) -> bool:
    """Whether ``path`` has the form of a hub id and is no path of this machine."""
    return path.count("/") <= 1 and not path.startswith((".", "/", "~")) and not Path(path).exists()


def is_whole(path: str, file: str) -> bool:
    """True for a folder that holds ``file``, and for what can be the id of a model on the hub."""
    return may_be_hub_id(path) or (Path(path) / file).is_file()
