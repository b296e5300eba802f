"""Records as the readers yield them, rejections and notes, and the limits within which files are opened."""

from __future__ import annotations

import codecs
import hashlib
import os
import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any, Self, TextIO

from visual_grpo.common.errors import UserError, sanitize, sentence
from visual_grpo.common.files import walk
from visual_grpo.config import DataConfig

IMAGE_SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif"}
    | {".heic", ".heif", ".jxl", ".jp2", ".ppm", ".pgm", ".pbm", ".tga"}
)
"""Suffixes in lower case. HEIC and JPEG XL cannot be read, but are included so that they are reported, not ignored."""
VIDEO_SUFFIXES = frozenset({".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi"})
_SYSTEM_FILES = frozenset({"thumbs.db", "desktop.ini", "__macosx"})
NULLS = frozenset({"", "nan", "null", "none", "n/a", "<na>"})
"""Spellings of missing values in spreadsheets and pandas, in lower case."""
INVISIBLE = "\ufeff\u200b"
"""Characters that nobody sees: the byte order mark and the zero-width space."""
LFS_REMEDY = "Fetch the files with: git lfs pull"
_LFS_POINTER = b"version https://git-lfs."
_MB = 1_000_000
_MOVE = "Move it into the folder, or set data.allow_outside=true if you trust these records"
_SNAPSHOT = re.compile(r"(.*/(?:models|datasets)--[^/]+)/snapshots/[^/]+(?:/.*)?", re.DOTALL)
"""Matches a folder in the Hugging Face cache, or one below it: the entry of a repository, and a commit."""
_MAX_SHOWN = 80
"""Characters of an invalid value shown in a message."""


@dataclass(frozen=True)
class Place:
    """A file relative to the data folder, and the line of a text file or row of a table, from 1."""

    file: str
    line: int | None = None

    def __str__(self) -> str:
        unit = "line" if self.file.endswith((".jsonl", ".csv", ".tsv", ".txt")) else "row"
        return self.file if self.line is None else f"{self.file}, {unit} {self.line}"


@dataclass(frozen=True)
class EmbeddedImage:
    """An image file stored within a larger file, such as a Parquet table; ``name`` is for messages."""

    name: str
    data: bytes

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    def open(self) -> BytesIO:
        file = BytesIO(self.data)
        file.name = self.name
        return file

    def __repr__(self) -> str:
        """Depends on the content only, because ids are made from it."""
        return f"EmbeddedImage({self.sha256})"


Original = Path | EmbeddedImage


@dataclass(frozen=True, kw_only=True)
class Record:
    """One record as a reader yields it; `checks.checked` returns it with checked values."""

    place: Place
    folder: Path
    """Base of relative image paths."""
    prompt: Any = None
    id: Any = None
    target_image: Any = None
    """A path as text or an `EmbeddedImage`; checked: an `Original` or None."""
    source_images: Any = None
    """One image or a list; checked: a tuple of `Original`."""
    group: Any = None
    metadata: Any = None
    """Checked: a JSON object as text, with ``extra``."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Other keys of the record; they become metadata."""
    found: Collection[str] = ()
    """Columns of the table's row, or keys of the annotation, that the record was read from."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Column or key of ``found`` -> what it became."""
    caption: str | None = None
    """The text file of the prompt, or of the picture's path, relative to ``folder``."""
    split: str | None = None
    """The split that the reader found it in, if its file and pictures do not tell."""

    @property
    def images(self) -> list[Any]:
        """The target and the sources of an unchecked record; None for a missing one."""
        sources = self.source_images if isinstance(self.source_images, list) else [self.source_images]
        return [self.target_image, *sources]


@dataclass(frozen=True)
class Note:
    """A remark about something that is not rejected; the report counts the notes of one text."""

    kind: str
    """The kind of thing that it is about, such as ``picture``."""
    text: str
    place: Place = Place("")

    def at(self, place: Place) -> Self:
        return replace(self, place=place)


@dataclass(eq=False)
class Rejected(Exception):  # noqa: N818 (an outcome, not a program error)
    """A record that cannot be used; raised by a check, yielded with its place by `at`."""

    reason: str
    """The word by which the report counts, such as ``missing_target``."""
    message: str
    remedy: str
    place: Place = Place("")
    id: str | None = None
    split: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    """Column of the table's row, if it has been read -> what it became."""

    def at(self, place: Place, record_id: object = None) -> Self:
        """Returns a copy with its place, without the traceback, whose frames would keep images in memory."""
        return replace(self, place=place, id=None if record_id is None else shorten(str(record_id)))

    def __str__(self) -> str:
        name = "" if self.id is None else f" (id {self.id!r})"
        return sanitize(f"{self.place}{name}: {sentence(self.message)} {sentence(self.remedy)}")


Item = Record | Rejected | Note


def wrong_type(key: str, expected: str, value: Any) -> Rejected:
    return Rejected("wrong_type", f"{key} must be {expected}, got {shorten(repr(value))}", "Correct the value")


def shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on what records may name and contain: an untrusted dataset may name any file of this machine."""

    folder: Path | None
    """Resolved folder that no record may leave; None = files may be anywhere."""
    max_file_bytes: int
    videos: bool = False
    """Targets are videos, which may also be folders of frames."""

    @classmethod
    def from_config(cls, data: DataConfig, path: Path) -> Self:
        # The masks of a table in the subfolder data, and the images of COCO's annotations, lie next to that folder.
        folder = path if path.is_dir() else path.parent
        if (path.suffix.lower(), folder.name) in ((".parquet", "data"), (".json", "annotations"), ("", "annotations")):
            folder = folder.parent
        return cls(
            folder=None if data.allow_outside else folder.resolve(),
            max_file_bytes=round(data.max_file_mb * _MB),
            videos=data.frames is not None,
        )

    def check(self, path: Path, name: str) -> None:
        """Raises `Rejected` for a path that leads outside (``..``, absolute, a link) or a file that is too large."""
        if not self.is_inside(path):
            raise Rejected("outside_folder", f"{name} leads outside the data's folder, {self.folder}", _MOVE)
        if path.is_file():
            self.check_size(path.stat().st_size, name)

    def check_size(self, size: int, name: str) -> None:
        if size > self.max_file_bytes:
            message = f"{name} has {size / _MB:,.4g} MB, more than data.max_file_mb={self.max_file_bytes / _MB:g}"
            raise Rejected("file_too_large", message, "Make it smaller, raise data.max_file_mb or remove the record")

    def is_target(self, name: str) -> bool:
        """Returns whether a file's name belongs to a picture, or to a video where targets are videos."""
        return is_image_name(name) or (self.videos and is_video_name(name))

    @cached_property
    def _folders(self) -> list[Path]:
        """``folder``, and of a snapshot in the Hugging Face cache the folder that its files are links to."""
        if self.folder is None:
            return []
        snapshot = _SNAPSHOT.fullmatch(str(self.folder))
        return [Path(self.folder), *([Path(snapshot[1], "blobs")] if snapshot else [])]

    def is_inside(self, path: Path) -> bool:
        """Returns whether the path is inside; also true for one that cannot exist, because of a NUL character."""
        try:
            real = Path(os.path.realpath(path))
            return not self._folders or any(map(real.is_relative_to, self._folders))
        except (ValueError, OSError):
            return True

    def require_inside(self, path: Path) -> None:
        """Raises a UserError for a file or folder of records that leads outside."""
        if not self.is_inside(path):
            raise UserError(f"{path} leads outside the data's folder, {self.folder}. {_MOVE}.")

    def walk(self, folder: Path) -> Iterator[str]:
        """Yields the files below a folder as relative paths with ``/``, sorted within each folder, files first.

        Links to folders are followed, each folder once, but not out of the data's folder. Dotfiles and system files of
        Windows and macOS are skipped.
        """
        for base, folders, files in walk(folder):
            self.require_inside(Path(base))
            folders[:] = sorted(name for name in folders if not is_system_file(name))
            below = Path(base).relative_to(folder)
            yield from ((below / name).as_posix() for name in sorted(files) if not is_system_file(name))


def listed(folder: Path) -> Iterator[str]:
    """Yields the files below a folder as relative paths with ``/``, and with a ``/`` at its end each folder that cannot
    be opened, such as one of a different user. Links to folders are not followed."""
    closed = list[str]()
    for base, folders, files in os.walk(folder, onerror=lambda error: closed.append(error.filename)):
        folders[:] = [name for name in folders if not is_system_file(name)]
        yield from ((Path(base) / name).relative_to(folder).as_posix() for name in files if not is_system_file(name))
    yield from (f"{Path(name).relative_to(folder).as_posix()}/" for name in closed)


def is_lfs_pointer(path: Path) -> bool:
    """True if Git LFS has left a pointer in place of the file."""
    with path.open("rb") as file:
        return file.read(len(_LFS_POINTER)) == _LFS_POINTER


def open_text(path: Path, newline: str | None = None) -> TextIO:
    """Opens UTF-8 text with or without a byte order mark; other bytes become surrogates, which `checks` rejects."""
    with path.open("rb") as file:
        if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise UserError(f"{path}: this is UTF-16 text. Save the file as UTF-8.")
    if is_lfs_pointer(path):
        raise UserError(f"{path} is a Git LFS pointer, not the file. {LFS_REMEDY}.")
    return path.open(encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def find_file(folder: Path, name: str) -> Path | None:
    """Returns the file that a dataset names, perhaps with Windows' separators or in a different Unicode form.

    None if it does not exist or is not an ordinary file.
    """
    texts = (name, name.replace("\\", "/"))
    forms = (unicodedata.normalize(form, text) for text in texts for form in ("NFC", "NFD"))
    for spelling in dict.fromkeys((*texts, *forms)):
        with suppress(OSError, ValueError):  # A name may be too long, in one of the forms only.
            if (folder / spelling).is_file():
                return folder / spelling
    return None


def stem_of(name: str) -> str:
    """Returns a path without suffix, as names of files that belong together are compared: in one Unicode form."""
    return unicodedata.normalize("NFC", str(PurePosixPath(name).with_suffix("")))


def is_image_name(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in IMAGE_SUFFIXES


def is_video_name(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in VIDEO_SUFFIXES


def is_system_file(name: str) -> bool:
    return name.startswith(".") or name.lower() in _SYSTEM_FILES
