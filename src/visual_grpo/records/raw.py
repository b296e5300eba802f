"""What a reader hands over: records as they were found, and what could not be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Place:
    """Where a record stands: a file relative to the data's folder and, in a text file, the line."""

    file: str
    line: int | None = None
    """1 for the first line."""

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}, line {self.line}"


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


def printable(text: str) -> str:
    """Text with bytes that are not UTF-8 (as in a file's name) written out as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


Item = RawRecord | Rejection | Note
