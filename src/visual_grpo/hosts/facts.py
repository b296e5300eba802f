"""What must be the same on all hosts, so that a sample does not depend on who draws it."""

from __future__ import annotations

import hashlib
import platform
from importlib import metadata

from visual_grpo.computed_with import LIBRARIES
from visual_grpo.hosts.launch import Launch
from visual_grpo.sources import package_folder


def facts(launch: Launch) -> dict[str, str]:
    """By name, as they are told where they differ."""
    versions = {name: found for name in LIBRARIES if (found := _version(name)) is not None}
    return {
        "torchrun's --rdzv-id": launch.run,
        "the number of processes": str(launch.count),
        "the code of visual_grpo": _code(),
        "python": platform.python_version(),
        **versions,
    }


def _code() -> str:
    """12 hex digits over this package's files."""
    folder, digest = package_folder(), hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:12]


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None
