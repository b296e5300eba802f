"""The output of the readers: unchecked records, rejections and notes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any, Self

from visual_grpo.common.errors import sentence, visible

_SHOWN = 80
"""Maximum characters of an invalid value shown in a message."""


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
    """An image file within another file, such as a Parquet table."""

    name: str
    """Its name in messages."""
    data: bytes

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    def open(self) -> BytesIO:
        file = BytesIO(self.data)
        file.name = self.name
        return file

    def __repr__(self) -> str:
        """Depends on the content only: ids are made from it."""
        return f"EmbeddedImage({self.sha256})"


Original = Path | EmbeddedImage


@dataclass(frozen=True, kw_only=True)
class RawRecord:
    """One record as a reader yields it; `checks.checked` gives it with checked values."""

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

    @property
    def shown_id(self) -> str | None:
        return None if self.id is None else shorten(str(self.id))


class Note(str):
    """A warning about the dataset as a whole."""


class Rejected(Exception):  # noqa: N818 (an outcome, not a program error)
    """A record that cannot be used, the ``reason`` by which the report counts, and a remedy.

    Raised by a check, yielded once its place is known.
    """

    def __init__(
        self, reason: str, message: str, remedy: str, place: Place = Place(""), record_id: str | None = None
    ) -> None:
        super().__init__(message)
        self.reason, self.message, self.remedy, self.place, self.id = reason, message, remedy, place, record_id

    def at(self, place: Place, record_id: str | None = None) -> Self:
        """A copy with the place, without the traceback, whose frames would keep images in memory."""
        return type(self)(self.reason, self.message, self.remedy, place, record_id)

    def __str__(self) -> str:
        name = "" if self.id is None else f" (id {self.id!r})"
        return visible(f"{self.place}{name}: {sentence(self.message)} {self.remedy}.")


Item = RawRecord | Rejected | Note


@contextmanager
def prefix_rejections(part: str) -> Iterator[None]:
    """Prefixes the messages of `Rejected` exceptions with the part of the record that they concern."""
    try:
        yield
    except Rejected as rejected:
        raise Rejected(rejected.reason, f"{part}: {rejected.message}", rejected.remedy) from rejected


def wrong_type(key: str, expected: str, value: Any) -> Rejected:
    return Rejected("wrong_type", f"{key} must be {expected}, got {shorten(repr(value))}", "Correct the value")


def shorten(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
