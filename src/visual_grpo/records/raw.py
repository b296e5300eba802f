"""The output of the layout readers: unchecked records, rejections and notes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

from visual_grpo.errors import sentence
from visual_grpo.visible_text import visible

_SHOWN = 80
"""Maximum characters of an invalid value shown in a message."""


@dataclass(frozen=True)
class Place:
    """The location of a record: a file relative to the data folder and, in a text file, the line."""

    file: str
    line: int | None = None
    """Starts at 1; the row in a Parquet file."""

    def __str__(self) -> str:
        unit = "row" if self.file.endswith(".parquet") else "line"
        return self.file if self.line is None else f"{self.file}, {unit} {self.line}"


@dataclass(frozen=True)
class EmbeddedImage:
    """An image file that is embedded in another file, such as a Parquet table."""

    name: str
    """Its name in messages."""
    data: bytes

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    def open(self) -> BytesIO:
        """The data as a file object whose ``name`` is used in messages."""
        file = BytesIO(self.data)
        file.name = self.name
        return file

    def __repr__(self) -> str:
        """Depends on the content only, because ids are made from it and must not depend on the record's location."""
        return f"EmbeddedImage({self.sha256})"


Original = Path | EmbeddedImage
"""An original image: a file, or bytes embedded in another file."""


@dataclass(frozen=True, kw_only=True)
class RawRecord:
    """One record as read from its layout, unchecked."""

    place: Place
    folder: Path
    """Base of relative image paths."""
    prompt: Any = None
    id: Any = None
    target_image: Any = None
    source_images: Any = None
    group: Any = None
    metadata: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Other keys of the record; they become metadata."""


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A record that cannot be used, the reason, and a remedy."""

    place: Place
    id: str | None
    reason: str
    """A short category, by which the report counts."""
    message: str
    remedy: str

    def __str__(self) -> str:
        name = "" if self.id is None else f" (id {self.id!r})"
        return visible(f"{self.place}{name}: {sentence(self.message)} {self.remedy}.")


@dataclass(frozen=True)
class Note:
    """A warning about the dataset as a whole."""

    text: str


class Rejected(Exception):  # noqa: N818 (an outcome, not a program error)
    """Raised when a check of a record fails; becomes a `Rejection` once the record's place is known."""

    def __init__(self, reason: str, message: str, remedy: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.remedy = remedy

    def at(self, place: Place, record_id: str | None = None) -> Rejection:
        return Rejection(place=place, id=record_id, reason=self.reason, message=self.message, remedy=self.remedy)


@contextmanager
def prefix_rejections(part: str) -> Iterator[None]:
    """Prefixes the messages of `Rejected` exceptions from the block with the part of the record that they concern."""
    try:
        yield
    except Rejected as rejected:
        raise Rejected(rejected.reason, f"{part}: {rejected.message}", rejected.remedy) from rejected


def given_id(raw: RawRecord) -> str | None:
    """The record's id, shortened for the report; available even if the record is rejected."""
    return None if raw.id is None else shorten(str(raw.id))


def wrong_type(key: str, expected: str, value: Any) -> Rejected:
    return Rejected("wrong_type", f"{key} must be {expected}, got {shorten(repr(value))}", "Correct the value")


def shorten(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


Item = RawRecord | Rejection | Note
