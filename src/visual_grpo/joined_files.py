"""Whether another machine has the files that a training reads: its processes would compute something else."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping
from pathlib import Path

from visual_grpo.config import Parameters
from visual_grpo.errors import UserError
from visual_grpo.importing import code_digest
from visual_grpo.saved_model import content_digest

_CODE = "code of "


def digests(config: Parameters, model: str, *folders: str | None) -> dict[str, str | None]:
    """Of what another process reads, by path; a hub id's is None, whose files the hub's own hashes check.

    Args:
        folders: of adapters.
    """
    found = {folder: content_digest(folder) for folder in (model, *folders) if folder is not None}
    if ":" in config.model.family:
        name = f"{_CODE}{config.model.family}"
        found[name] = _digest(name)
    if config.data.task != "t2i":
        pictures = str(Path(config.output) / "05_model_input")
        found[f"{pictures}/"] = _digest(f"{pictures}/")
    return found


def check_same(files: Mapping[str, str | None]) -> None:
    """Raises UserError where a file of this machine is another than `digests` was given on the first one's."""
    for name, expected in files.items():
        found = _digest(name)
        if found != expected and expected is not None:
            what = "is not there" if found is None else "is another than that of the first process"
            raise UserError(
                f"{name} {what}, on {socket.gethostname()} in {Path.cwd()}. Expected the same files at the same path on"
                " every host: put the project on a file system that all share, or copy it there again."
            )


def _digest(name: str) -> str | None:
    """None where it is not there."""
    if name.startswith(_CODE):
        return code_digest(name.removeprefix(_CODE))
    return _listing(Path(name)) if name.endswith("/") else content_digest(name)


def _listing(folder: Path) -> str | None:
    """Of the files' names and sizes: pictures may be many."""
    if not folder.is_dir():
        return None
    files = sorted(file for file in folder.rglob("*") if file.is_file() and not file.name.startswith("."))
    sizes = [[file.relative_to(folder).as_posix(), file.stat().st_size] for file in files]
    return hashlib.sha256(json.dumps(sizes).encode()).hexdigest()
