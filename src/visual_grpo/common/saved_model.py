"""A saved model: a folder, or an id on the model hub."""

from __future__ import annotations

import json
from pathlib import Path

from visual_grpo.common.files import tree_digest

_LOADED = {".jinja", ".json", ".model", ".safetensors", ".txt"}
"""Endings of the files that a model is loaded from."""
_RECORD = "content.json"
_NOTES = {"starter.json", _RECORD}
"""Files that say how the folder was made."""


def may_be_hub_id(path: str) -> bool:
    """Whether ``path`` has the form of a hub id and is no path of this machine."""
    return path.count("/") <= 1 and not path.startswith((".", "/", "~")) and not Path(path).exists()


def content_digest(folder: str | Path) -> str | None:
    """A hex digest of everything that a model is loaded from; None for a hub id, whose files are not here.

    Every byte is read once in a process.
    """
    root = Path(folder)
    if not root.is_dir():
        return None
    inside = (file.relative_to(root) for file in root.rglob("*") if file.suffix in _LOADED and file.name not in _NOTES)
    return tree_digest(root, (root / file for file in inside if not any(part.startswith(".") for part in file.parts)))


def record_content(folder: Path) -> None:
    """Notes the digest of a model that was just made beside its files."""
    (folder / _RECORD).write_text(json.dumps({"content": content_digest(folder)}), encoding="utf-8")


def recorded_content(folder: Path) -> str | None:
    """The digest that the model's maker noted; of a model without a note its present one."""
    record = folder / _RECORD
    if not record.is_file():
        return content_digest(folder)
    noted: str = json.loads(record.read_text(encoding="utf-8"))["content"]
    return noted
