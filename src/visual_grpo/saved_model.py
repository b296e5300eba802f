"""A saved model, a folder or an id on the model hub, and whether its files are what was published."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from visual_grpo.errors import UserError
from visual_grpo.files import digest_once, tree_digest

_LOADED = {".jinja", ".json", ".model", ".safetensors", ".txt"}
"""Endings of the files that a model is loaded from."""
_RECORD = "content.json"
_NOTES = {"starter.json", _RECORD}
"""Files that say how the folder was made."""


def may_be_hub_id(path: str) -> bool:
    """Whether ``path`` has the form of a hub id and is no path of this machine."""
    return path.count("/") <= 1 and not path.startswith((".", "/", "~")) and not Path(path).exists()


def is_whole(path: str, file: str) -> bool:
    """True for a folder that holds ``file``, and for what can be the id of a model on the hub."""
    return may_be_hub_id(path) or (Path(path) / file).is_file()


def content_digest(folder: str | Path) -> str | None:
    """A hex digest of everything that a model is loaded from; None for a hub id, whose files are not here.

    Every byte is read once in a process.
    """
    root = Path(folder)
    if not root.is_dir():
        return None
    return tree_digest(root, (file for file in root.rglob("*") if _is_loaded(file.relative_to(root))))


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


def _is_loaded(file: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.parts)
    return file.suffix in _LOADED and file.name not in _NOTES and not hidden


_INDICES = ("model_index.json", "config.json")
_SHA256, _SHA1 = 64, 40
"""Lengths of hexadecimal digests."""


def check_downloads(model: str, revision: str | None) -> None:
    """Raises UserError if a downloaded file of a pinned model is not what the hub published.

    The hub's cache names each file by its hash: the sha256 of large files, git's hash of the others.
    """
    snapshot = _snapshot(model, revision)
    if snapshot is not None and revision is not None:
        check_snapshot(model, revision, snapshot)


def check_snapshot(model: str, revision: str, snapshot: Path) -> None:
    """As `check_downloads`, of the folder of a revision in the hub's cache."""
    for file in sorted(snapshot.rglob("*")):
        if file.is_file() and not _is_as_named(file):
            raise UserError(
                f"{file} of {model} is not what the hub published for revision {revision}. Delete {file.resolve()}, and"
                " it is downloaded again."
            )


def _snapshot(model: str, revision: str | None) -> Path | None:
    """The folder of the revision in the hub's cache."""
    if revision is None or not may_be_hub_id(model):
        return None
    from huggingface_hub import try_to_load_from_cache

    found = [try_to_load_from_cache(model, name, revision=revision) for name in _INDICES]
    return next((Path(path).parent for path in found if isinstance(path, str)), None)


def _is_as_named(file: Path) -> bool:
    """True also for a cache without links, as on some Windows machines, where no name tells the hash."""
    name = file.resolve().name
    if not file.is_symlink() or not set(name) <= set("0123456789abcdef"):
        return True
    if len(name) == _SHA256:
        return digest_once(file) == name
    return len(name) != _SHA1 or _git_hash(file) == name


def _git_hash(file: Path) -> str:
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
