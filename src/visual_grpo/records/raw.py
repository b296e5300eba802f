"""What a reader hands over: records as they were found, and what could not be read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

_SHOWN = 80
"""Characters of a wrong value that a message shows."""


@dataclass(frozen=True)
class Place:
    """Where a record stands: a file relative to the data's folder and, in a text file, the line."""

    file: str
    line: int | None = None
    """1 for the first line; of a Parquet file the row."""

    def __str__(self) -> str:
        unit = "row" if self.file.endswith(".parquet") else "line"
        return self.file if self.line is None else f"{self.file}, {unit} {self.line}"


@dataclass(frozen=True)
class EmbeddedImage:
    """An image file that lies within another file, such as a Parquet table."""

    name: str
    """What messages call it."""
    data: bytes

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    def open(self) -> BytesIO:
        """The file, named for messages."""
        file = BytesIO(self.data)
        file.name = self.name
        return file

    def __repr__(self) -> str:
        """By its content alone: ids are made of this, and must not depend on where the record stands."""
        return f"EmbeddedImage({self.sha256})"


Original = Path | EmbeddedImage
"""An image as it was found."""


@dataclass(frozen=True, kw_only=True)
class RawRecord:
    """One record as its layout says it, nothing checked yet."""

    place: Place
    folder: Path
    """Relative image paths start here."""
    prompt: Any = None
    id: Any = None
    target_image: Any = None
    source_images: Any = None
    group: Any = None
    metadata: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the record; they become metadata."""


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A record that cannot be used, why, and what its owner can do."""

    place: Place
    id: str | None
    reason: str
    """One of a few short names, which the report counts by."""
    message: str
    remedy: str

    def __str__(self) -> str:
        name = "" if self.id is None else f" (id {self.id!r})"
        return printable(f"{self.place}{name}: {self.message}. {self.remedy}.")


@dataclass(frozen=True)
class Note:
    """Something about the data as a whole that its owner should know."""

    text: str


class Rejected(Exception):  # noqa: N818 (an outcome, not an error of the program)
    """Raised where a record is found wanting; becomes a `Rejection` once its place is known."""

    def __init__(self, reason: str, message: str, remedy: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.remedy = remedy

    def at(self, place: Place, record_id: str | None = None) -> Rejection:
        return Rejection(place=place, id=record_id, reason=self.reason, message=self.message, remedy=self.remedy)


def given_id(raw: RawRecord) -> str | None:
    """The id for the report, even of a record that is rejected."""
    return None if raw.id is None else shorten(str(raw.id))


def wrong_type(key: str, expected: str, value: Any) -> Rejected:
    return Rejected("wrong_type", f"{key} must be {expected}, got {shorten(repr(value))}", "Correct the value")


def shorten(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def printable(text: str) -> str:
    """Text with bytes that are not UTF-8 (as in a file's name) written out as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


Item = RawRecord | Rejection | Note
