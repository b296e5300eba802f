"""Opens the files of a dataset within its limits: it may come from a stranger and name any file of this machine."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Self, TextIO

from visual_grpo.common.errors import UserError
from visual_grpo.config import DataConfig
from visual_grpo.data.raw import Rejected

IMAGE_SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif"}
    | {".heic", ".heif", ".jp2", ".ppm", ".pgm", ".pbm", ".tga"}
)
"""In lower case. HEIC cannot be read, but is included so that HEIC files are reported instead of ignored."""

_SYSTEM_FILES = frozenset({"thumbs.db", "desktop.ini", "__macosx"})
_MB = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Guard:
    folder: Path | None
    """Resolved folder that no record may leave; None = files may be anywhere."""
    max_file_bytes: int
    max_pixels: int

    @classmethod
    def of(cls, data: DataConfig, path: Path) -> Self:
        """The limits of the dataset at ``path``."""
        # The masks of a table in the subfolder data lie beside that folder.
        in_data = path.suffix.lower() == ".parquet" and path.parent.name == "data"
        folder = path if path.is_dir() else path.parent.parent if in_data else path.parent
        return cls(
            folder=None if data.allow_outside else folder.resolve(),
            max_file_bytes=round(data.max_file_mb * _MB),
            max_pixels=data.max_pixels,
        )

    def check(self, path: Path, name: str) -> None:
        """Raises `Rejected` for a path that leads outside (``..``, absolute, a link) or a file that is too large."""
        if not self.is_inside(path):
            remedy = "Move the file into the folder, or set data.allow_outside=true if you trust these records"
            raise Rejected("outside_folder", f"{name} leads outside the data's folder, {self.folder}", remedy)
        if path.is_file():
            self.check_size(path.stat().st_size, name)

    def check_size(self, size: int, name: str) -> None:
        if size > self.max_file_bytes:
            message = f"{name} has {size / _MB:,.4g} MB, more than data.max_file_mb={self.max_file_bytes / _MB:g}"
            raise Rejected("file_too_large", message, "Make it smaller, raise data.max_file_mb or remove the record")

    def is_inside(self, path: Path) -> bool:
        """Also true for a path that cannot exist, because of a NUL character or bytes that no file name has."""
        try:
            return self.folder is None or Path(os.path.realpath(path)).is_relative_to(self.folder)
        except (ValueError, OSError):
            return True

    def require_inside(self, path: Path) -> None:
        """Raises a UserError for a file or folder with many records that must not be read."""
        if not self.is_inside(path):
            raise UserError(
                f"{path} leads outside the data's folder, {self.folder}. Move it into the folder, or set"
                " data.allow_outside=true if you trust these records."
            )

    def walk(self, folder: Path) -> Iterator[str]:
        """Yields the files below a folder as relative paths with ``/``, sorted within each folder, files first.

        Links to folders are followed, each folder once, but not out of the data's folder. Dotfiles and system files of
        Windows and macOS are skipped.
        """
        seen = set()
        for base, folders, files in os.walk(folder, followlinks=True):
            self.require_inside(Path(base))
            real = os.path.realpath(base)
            folders[:] = [] if real in seen else sorted(name for name in folders if not is_system_file(name))
            if real not in seen:
                seen.add(real)
                below = Path(base).relative_to(folder)
                yield from ((below / name).as_posix() for name in sorted(files) if not is_system_file(name))


def open_text(path: Path, newline: str | None = None) -> TextIO:
    """Opens UTF-8 text with or without a byte order mark; other bytes become surrogates, which `checks` rejects."""
    with path.open("rb") as file:
        if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise UserError(f"{path}: this is UTF-16 text. Save the file as UTF-8.")
    return path.open(encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def is_image_name(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in IMAGE_SUFFIXES


def is_system_file(name: str) -> bool:
    return name.startswith(".") or name.lower() in _SYSTEM_FILES
