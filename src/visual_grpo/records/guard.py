"""Decides which files of a dataset may be opened: it may come from a stranger and name any file of this machine."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Self

from visual_grpo.config import DataConfig
from visual_grpo.errors import UserError, sentence
from visual_grpo.records.raw import Place, Rejected

IMAGE_SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif"}
    | {".heic", ".heif", ".jp2", ".ppm", ".pgm", ".pbm", ".tga"}
)
"""In lower case. HEIC cannot be read, but is included so that HEIC files are reported instead of ignored."""

_SYSTEM_FILES = frozenset({"thumbs.db", "desktop.ini", "__macosx"})
_SYSTEM_FOLDERS = ("/proc/", "/sys/")
"""Their files look like ordinary ones, but some block when they are read, and others have the process's secrets."""
_MB = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Guard:
    """The limits of ``data``; every check is made without opening the file."""

    folder: Path | None
    """Resolved folder that no record may leave; None = files may be anywhere."""
    max_file_bytes: int
    max_record_bytes: int
    """Limit of a record's text: a line, a CSV row, a caption."""
    max_pixels: int

    @classmethod
    def of(cls, data: DataConfig, path: Path | None = None) -> Self:
        """``path`` is the dataset, if it is not at ``data.path`` itself, as that of an archive."""
        return cls(
            folder=None if data.allow_outside else _data_folder(path or Path(data.path)),
            max_file_bytes=round(data.max_file_mb * _MB),
            max_record_bytes=round(data.max_record_mb * _MB),
            max_pixels=data.max_pixels,
        )

    def check(self, path: Path, name: str) -> None:
        """Checks a file that a record names; one that does not exist passes.

        Raises:
            Rejected: outside the folder, not an ordinary file, or too large.
        """
        self.check_place(path, name)
        if (status := _status(path)) is not None:
            self.check_size(status.st_size, name)

    def check_place(self, path: Path, name: str) -> None:
        """Raises `Rejected` for a path that leads outside (``..``, absolute, a link) or is no ordinary file."""
        if not self.is_inside(path):
            raise Rejected(
                "outside_folder",
                f"{name} leads outside the data's folder, {self.folder}",
                "Move the file into the folder, or set data.allow_outside=true if you trust these records",
            )
        if is_special(path):
            raise Rejected("special_file", f"{name} is not an ordinary file", "Give the path of a file")

    def check_size(self, size: int, name: str) -> None:
        if size > self.max_file_bytes:
            raise Rejected(
                "file_too_large",
                f"{name} has {size / _MB:,.4g} MB, more than data.max_file_mb={self.max_file_bytes / _MB:g}",
                "Make the file smaller, raise data.max_file_mb or remove the record",
            )

    def is_inside(self, path: Path) -> bool:
        """Also true for a path that cannot exist, because of a NUL character or bytes that no file name has."""
        try:
            return self.folder is None or Path(os.path.realpath(path)).is_relative_to(self.folder)
        except (ValueError, OSError):
            return True

    def require(self, path: Path) -> None:
        """Raises a UserError for a file with many records that must not be read."""
        try:
            self.check_place(path, str(path))
        except Rejected as rejected:
            raise UserError(f"{sentence(rejected.message)} {rejected.remedy}.") from rejected

    def walk(self, folder: Path, refused: list[Rejected] | None = None) -> Iterator[str]:
        """Yields the files below a folder as relative paths with ``/``, sorted within each folder, files first.

        Links to folders are followed, each folder once; one that leads outside is not entered and added to
        ``refused``. Dotfiles and system files of Windows and macOS are skipped.
        """
        waiting, seen = [""], set()
        while waiting:
            prefix = waiting.pop()
            status = (folder / prefix).stat()
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            entries = sorted(os.scandir(folder / prefix), key=lambda entry: entry.name)
            entries = [entry for entry in entries if not is_system_file(entry.name)]
            yield from (prefix + entry.name for entry in entries if not entry.is_dir())
            inside = []
            for name in (f"{prefix}{entry.name}/" for entry in entries if entry.is_dir()):
                try:
                    self.check_place(folder / name, f"the folder {name}")
                    inside.append(name)
                except Rejected as rejected:
                    (refused if refused is not None else []).append(rejected.at(Place(name)))
            waiting += reversed(inside)


def is_special(path: Path) -> bool:
    """True if a path is a pipe, a device, a socket or a file of the operating system."""
    status = _status(path)
    if status is None:
        return False
    is_system = os.path.realpath(path).startswith(_SYSTEM_FOLDERS)
    return is_system or not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode))


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (OSError, ValueError):
        return None


def is_image_name(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in IMAGE_SUFFIXES


def is_system_file(name: str) -> bool:
    return name.startswith(".") or name.lower() in _SYSTEM_FILES


def _data_folder(path: Path) -> Path:
    """The folder that a dataset's files belong in, resolved."""
    if path.is_dir():
        return path.resolve()
    # The masks of a table in the subfolder data lie beside that folder.
    in_data = path.suffix.lower() == ".parquet" and path.parent.name == "data"
    return (path.parent.parent if in_data else path.parent).resolve()
