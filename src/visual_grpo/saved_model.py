"""Where a saved model may be: a folder, or an id on the model hub."""

from __future__ import annotations

from pathlib import Path


def is_whole(path: str, file: str) -> bool:
    """True for a folder that holds ``file``, and for what can be the id of a model on the hub."""
    can_be_id = path.count("/") <= 1 and not path.startswith((".", "/", "~")) and not Path(path).exists()
    return can_be_id or (Path(path) / file).is_file()
