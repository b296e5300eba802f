"""The files of a model from the hub, held against the hashes by which the hub names them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from visual_grpo.errors import UserError
from visual_grpo.files import digest_once
from visual_grpo.saved_model import may_be_hub_id

_INDICES = ("model_index.json", "config.json")
_SHA256, _SHA1 = 64, 40
"""Lengths of hexadecimal digests."""


def check_downloads(model: str, revision: str | None) -> None:
    """Raises UserError if a downloaded file of a pinned model is not what the hub published.

    The hub's cache names each file by its hash: the sha256 of large files, git's hash of the others. Without a
    revision nothing is checked: then the newest files are asked for, whatever they are.
    """
    snapshot = _snapshot(model, revision)
    if snapshot is not None and revision is not None:
        check_snapshot(model, revision, snapshot)


def check_snapshot(model: str, revision: str, snapshot: Path) -> None:
    """As `check_downloads`, of the folder of a revision in the hub's cache."""
    for file in sorted(snapshot.rglob("*")):
        if file.is_file() and not _is_as_named(file):
            raise UserError(
                f"{file} of {model} is not what the hub published for revision {revision}: its content does not have"
                f" the hash {file.resolve().name}. It was damaged or changed after the download. Delete"
                f" {file.resolve()}, and it is downloaded again."
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
