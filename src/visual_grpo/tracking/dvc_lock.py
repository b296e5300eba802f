"""Reads a dvc.lock. A damaged one is refused with a message that says what to do; DVC's message does not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from visual_grpo.errors import UserError

_DIGESTS = ("md5", "etag", "checksum")
"""Of them an entry has one, by the kind of storage."""
_MARKERS = ("<<<<<<<", "=======", ">>>>>>>")
"""Beginnings of the lines that git writes into a file that it cannot merge."""


def stages_of(lock: Path, project: Path) -> dict[str, Any]:
    """The stages by their names; none where there is no such file.

    Args:
        lock: relative to ``project``.

    Raises:
        UserError: it is damaged.
    """
    if not (project / lock).is_file():
        return {}
    text = (project / lock).read_text(encoding="utf-8", errors="replace")
    try:
        tree = yaml.safe_load(text)
        damage = _damage(tree) or (None if text.endswith("\n") else "it ends in the middle of a line")
    except yaml.YAMLError as error:
        damage = str(error)
    if damage is not None:
        raise UserError(_message(lock, text, damage))
    stages: dict[str, Any] = tree["stages"]
    return stages


def _damage(tree: Any) -> str | None:
    """What is not as DVC writes it."""
    if tree is None:
        return "it is empty"
    if not isinstance(tree, Mapping) or not isinstance(tree.get("stages"), Mapping) or "schema" not in tree:
        return "it lacks schema or stages, which DVC writes into it"
    for name, stage in tree["stages"].items():
        if not isinstance(stage, Mapping) or "cmd" not in stage:
            return f"its stage {name} lacks cmd"
        for kind in ("deps", "outs"):
            entries = stage.get(kind, [])
            if not isinstance(entries, list) or not all(_is_whole(entry) for entry in entries):
                return f"{kind} of its stage {name} lack a path or a digest"
    return None


def _is_whole(entry: object) -> bool:
    return isinstance(entry, Mapping) and bool(entry.get("path")) and any(entry.get(kind) for kind in _DIGESTS)


def _message(lock: Path, text: str, damage: str) -> str:
    back = f"put back the one that git has: git checkout {lock}"
    if any(line.startswith(_MARKERS) for line in text.splitlines()):
        damage = "it has marks of a merge in it (<<<<<<<)"
        back = f"take that of your branch, or the other with --theirs: git checkout --ours {lock}"
    return (
        f"{lock} is damaged: {damage}\nDVC keeps the hashes of what its stages read and wrote there. To repair it,"
        f" {back}\nOr let DVC write it again (results in its cache are not made again): rm {lock} &&"
        f" .venv/bin/dvc repro {lock.with_name('dvc.yaml')}"
    )
