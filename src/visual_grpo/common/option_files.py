"""Files and folders that the options of a reward name: its scores depend on their content."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from visual_grpo.common.files import digest_once, tree_digest

_HERE = Path()
CACHE = "cache"
"""The option, at any depth, that names a place which the reward writes into."""


def option_files(options: Mapping[str, Any], output: str, base: Path = _HERE) -> dict[str, str]:
    """12 hex digits of the content of each file, and of each folder with all that is in it, by the option's dotted
    name. Everything is read once in a process.

    Left out are `CACHE`, and folders that hold the project or ``output``, in which a run itself writes.

    Args:
        base: the project's folder, which relative paths start from.
    """
    return {name: _digest(path) for name, path in named_paths(options, output, base)}


def named_paths(options: Mapping[str, Any], output: str, base: Path = _HERE) -> Iterator[tuple[str, Path]]:
    """The option's dotted name, and the file or folder, which exists."""
    for name, text in _texts(options, ""):
        path = _existing(text, base)
        if path is not None and not _holds(path, base) and not _holds(path, base / output):
            yield name, path


def _texts(value: object, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield name, value
        return
    if isinstance(value, Mapping):
        parts = [(str(key), part) for key, part in value.items() if key != CACHE]
    elif isinstance(value, list | tuple):
        parts = [(str(number), part) for number, part in enumerate(value)]
    else:
        return
    for key, part in parts:
        yield from _texts(part, f"{name}.{key}" if name else key)


def _existing(text: str, base: Path) -> Path | None:
    try:
        path = base / Path(text).expanduser()
        return path if text and path.exists() else None
    except (OSError, ValueError, RuntimeError):  # No path: a long text, one with a zero, or ~ of nobody.
        return None


def _holds(path: Path, inner: Path) -> bool:
    return path.is_dir() and inner.resolve().is_relative_to(path.resolve())


def _digest(path: Path) -> str:
    return (digest_once(path) if path.is_file() else tree_digest(path))[:12]
