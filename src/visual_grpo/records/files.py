"""Finds files in a folder without holding all their names in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from visual_grpo.errors import nearest
from visual_grpo.records.guard import ANYWHERE, Guard, special_kind
from visual_grpo.records.raw import Place, Rejected, Rejection

IMAGE_SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif"}
    | {".heic", ".heif", ".jp2", ".ppm", ".pgm", ".pbm", ".tga"}
)
"""In lower case. HEIC cannot be read, but is included so that HEIC files are reported instead of ignored."""

_SYSTEM_FILES = frozenset({"thumbs.db", "desktop.ini", "__macosx"})


def walk(folder: Path, guard: Guard = ANYWHERE) -> Iterator[str]:
    """Yields the files below a folder as relative paths with ``/``, in no particular order.

    Links to folders are followed, each folder once, unless they lead outside the data's folder: such a folder is
    yielded itself, with a ``/`` at its end. Dotfiles and system files of Windows and macOS are skipped.
    """
    waiting = [""]
    seen: set[tuple[int, int]] = set()
    while waiting:
        prefix = waiting.pop()
        status = (folder / prefix).stat()
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(folder / prefix) as entries:
            for entry in entries:
                if is_system_file(entry.name):
                    continue
                if entry.is_dir():
                    if entry.is_symlink() and not guard.is_inside(Path(entry.path)):
                        yield f"{prefix}{entry.name}/"
                        continue
                    waiting.append(f"{prefix}{entry.name}/")
                else:
                    yield prefix + entry.name


def is_left_out(name: str) -> bool:
    """Whether `walk` has yielded a folder that it did not enter."""
    return name.endswith("/")


def left_out(name: str, root: Path, guard: Guard) -> Rejection:
    """The rejection of all that is in a folder that `walk` did not enter."""
    try:
        guard.check_inside(root / name, f"the folder {name}")
    except Rejected as rejected:
        return rejected.at(Place(name))
    raise ValueError(f"{name} lies in the data's folder")


def missing_file(wanted: str, path: Path, names: Sequence[str]) -> str:
    """That a file is not at ``path``, and which of ``names`` (files below it) may have been meant."""
    if not path.is_dir():
        return f"the path is {special_kind(path) or path.name}, not {wanted}"
    kind = special_kind(path / wanted)
    if kind is not None:
        return f"{wanted} is {kind}, not an ordinary file"
    below = next((name for name in names if name.endswith(f"/{wanted}")), None)
    if below is not None:
        return f"there is no {wanted} but {below}: give data.path={path / below.rpartition('/')[0]}"
    top = [name for name in names if "/" not in name]
    near = nearest(wanted, top, cutoff=0.75)
    return f"there is no {wanted}" + (f" but {near}: rename it, or give it as data.path" if near else "")


def is_image_name(name: str) -> bool:
    """True if the name has an image suffix, in any letter case."""
    return not is_left_out(name) and PurePosixPath(name).suffix.lower() in IMAGE_SUFFIXES


def is_system_file(name: str) -> bool:
    return name.startswith(".") or name.lower() in _SYSTEM_FILES
