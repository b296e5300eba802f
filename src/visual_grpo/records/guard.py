"""What of a dataset may be opened: it may come from a stranger, and name any file of this machine."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from visual_grpo.config import DataConfig
from visual_grpo.errors import UserError, sentence
from visual_grpo.records.raw import Rejected

_SYSTEM_FOLDERS = ("/proc", "/sys")
"""Their files look like ordinary ones, but some block when they are read, and others have the process's secrets."""

_SPECIAL = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)

_MB = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Guard:
    """The limits of ``data``; every check is made without opening the file."""

    folder: Path | None = None
    """Resolved folder that no record may leave; None = files may be anywhere."""
    max_file_bytes: int
    max_record_bytes: int
    """Of a record's text: a line, a CSV row, a caption."""
    max_pixels: int

    @classmethod
    def of(cls, data: DataConfig) -> Self:
        return cls(
            folder=None if data.allow_outside else data_folder(Path(data.path)),
            max_file_bytes=round(data.max_file_mb * _MB),
            max_record_bytes=round(data.max_record_mb * _MB),
            max_pixels=data.max_pixels,
        )

    def check(self, path: Path, name: str) -> None:
        """Checks a file that a record names; one that does not exist passes.

        Args:
            name: the file in messages.

        Raises:
            Rejected: outside the folder, not an ordinary file, or too large.
        """
        self.check_inside(path, name)
        self.check_ordinary(path, name)
        size = _status(path)
        if size is not None and size.st_size > self.max_file_bytes:
            raise too_large(name, size.st_size, self.max_file_bytes)

    def check_inside(self, path: Path, name: str) -> None:
        """Raises `Rejected` for a file or folder that leads outside the folder: by ``..``, absolutely or by a link."""
        if not self.is_inside(path):
            raise Rejected(
                "outside_folder",
                f"{name} leads outside the data's folder, {self.folder}",
                "Move the file into the folder, or set data.allow_outside=true if you trust these records",
            )

    def is_inside(self, path: Path) -> bool:
        """Also true for a path that cannot exist, because of a NUL character or bytes that no file name has."""
        try:
            return self.folder is None or Path(os.path.realpath(path)).is_relative_to(self.folder)
        except (ValueError, OSError):
            return True

    def check_ordinary(self, path: Path, name: str) -> None:
        """Raises `Rejected` for a device, a FIFO, a socket or a file of the operating system."""
        kind = special_kind(path)
        if kind is not None:
            raise Rejected("special_file", f"{name} is {kind}, not an ordinary file", "Give the path of a file")

    def require(self, path: Path) -> None:
        """As `check_inside` and `check_ordinary`, for a file with many records.

        Raises:
            UserError: the file must not be read.
        """
        try:
            self.check_inside(path, str(path))
            self.check_ordinary(path, str(path))
        except Rejected as rejected:
            raise UserError(f"{sentence(rejected.message)} {rejected.remedy}.") from rejected


def data_folder(path: Path) -> Path:
    """The folder that a dataset's files belong in, resolved."""
    if path.is_dir():
        return path.resolve()
    # The masks of a table in the subfolder data lie beside that folder, see layouts.seg_zero.
    in_data = path.suffix.lower() == ".parquet" and path.parent.name == "data"
    return (path.parent.parent if in_data else path.parent).resolve()


def special_kind(path: Path) -> str | None:
    """What a path is that is neither an ordinary file nor a folder; None also if there is nothing."""
    status = _status(path)
    if status is None:
        return None
    if os.path.realpath(path).startswith(tuple(f"{folder}/" for folder in _SYSTEM_FOLDERS)):
        return "a file of the operating system"
    return next((kind for is_kind, kind in _SPECIAL if is_kind(status.st_mode)), None)


def too_large(name: str, size: int, most: int) -> Rejected:
    """``size`` and ``most`` in bytes."""
    return Rejected(
        "file_too_large",
        f"{name} has {size / _MB:,.4g} MB, more than data.max_file_mb={most / _MB:g}",
        "Make the file smaller, raise data.max_file_mb or remove the record",
    )


def too_many_pixels(name: str, width: int, height: int, most: int) -> Rejected:
    return Rejected(
        "too_many_pixels",
        f"{name} is {width}x{height} pixels, {width * height:,} in all, more than data.max_pixels={most}",
        "Scale it down, raise data.max_pixels or remove the record",
    )


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (OSError, ValueError):
        return None


ANYWHERE = Guard.of(DataConfig(path=".", height=32, width=32, allow_outside=True))
"""The default limits of size, for files that may lie anywhere."""
