"""The file of choices: one JSON object a line, only ever appended to.

A line says which of two pictures somebody preferred for a prompt. The last line of a voter about a pair counts, so that
a choice is taken back by one more line. A line that cannot be read is left out by name and never deleted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from visual_grpo.errors import UserError
from visual_grpo.files import write_atomically

FIRST, SECOND, TIE, SKIP, UNDO = "first", "second", "tie", "skip", "undo"
ANSWERS = (FIRST, SECOND, TIE, SKIP)
AB = "ab"
"""The source of pairs of the base model's picture (first) and the trained one's (second), on held-out prompts."""
_SHOWN = 80
"""Characters of a damaged line in a message."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two pictures for one prompt, in an order that no voter sees."""

    pair: str
    """Id; the same for the same pictures of the same prompt."""
    source: str
    """``draw``, `AB` or a folder."""
    prompt: str
    record: str
    """Id of the prompt's record."""
    family: str
    """Prompts that are of one kind: the record's metadata ``family``, else the prompt."""
    unit: str
    """Equal for prompts that are held out together."""
    first: str
    """Picture, relative to the folder of the file of choices."""
    second: str
    sources: tuple[str, ...] = ()
    """Pictures to edit, as ``first``."""

    @classmethod
    def of_line(cls, line: Mapping[str, Any]) -> Pair:
        """Raises KeyError for a value that is missing, TypeError for one that is no text."""
        texts = {own.name: line[own.name] for own in fields(cls) if own.name != "sources"}
        for name, value in (*texts.items(), *(("sources", source) for source in line["sources"])):
            if not isinstance(value, str):
                raise TypeError(f"{name} must be a text, got {value!r}")
        return cls(**texts, sources=tuple(line["sources"]))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a voter said of a pair."""

    of: Pair
    voter: str
    choice: str
    """One of `ANSWERS`."""
    shown_left: str
    """`FIRST` or `SECOND`: which picture was on the left."""
    at: str
    """ISO 8601, UTC."""

    @property
    def preference(self) -> float | None:
        """1 where the first picture was preferred, 0 where the second was, 0.5 for a tie; None = skipped."""
        return {FIRST: 1.0, SECOND: 0.0, TIE: 0.5}.get(self.choice)

    def line(self) -> dict[str, Any]:
        return {"voter": self.voter, "choice": self.choice, **asdict(self.of), "left": self.shown_left, "at": self.at}


@dataclass(frozen=True)
class Damaged:
    """A line that cannot be read."""

    number: int
    """1 for the first line."""
    text: bytes
    why: str

    def __str__(self) -> str:
        shown = self.text[:_SHOWN].decode("utf-8", "backslashreplace")
        return f"line {self.number} ({self.why}): {shown}{'...' * (len(self.text) > _SHOWN)}"


@dataclass(frozen=True)
class Choices:
    """What a file says."""

    standing: Sequence[Choice]
    """The last word of every voter on every pair, in the order in which it was said; nothing that was taken back."""
    damaged: Sequence[Damaged]


def read_choices(file: Path) -> Choices:
    """The choices that stand, and the lines that cannot be read; an absent file has none.

    Raises:
        UserError: the file cannot be opened.
    """
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return Choices((), ())
    except OSError as error:
        raise UserError(f"the file of choices {file} cannot be read: {error.strerror}") from error
    standing: dict[tuple[str, str], Choice] = {}
    damaged = []
    for number, text in enumerate(content.split(b"\n"), start=1):
        if not text.strip():
            continue
        try:
            voter, pair, choice = _parsed(text)
        except (ValueError, TypeError, KeyError) as error:
            damaged.append(Damaged(number, text, _why(error)))
            continue
        # Said again, it is the latest word.
        standing.pop((voter, pair), None)
        if choice is not None:
            standing[voter, pair] = choice
    return Choices(tuple(standing.values()), tuple(damaged))


def _parsed(text: bytes) -> tuple[str, str, Choice | None]:
    """Voter, pair and choice of a line; no choice where one is taken back."""
    line = json.loads(text)
    if not isinstance(line, Mapping):
        raise TypeError("no JSON object")
    voter, said, pair = line["voter"], line["choice"], line["pair"]
    if not isinstance(voter, str) or not isinstance(pair, str):
        raise TypeError("voter and pair must be texts")
    if said == UNDO:
        return voter, pair, None
    if said not in ANSWERS:
        raise ValueError(f"choice is none of {', '.join(ANSWERS)}, {UNDO}")
    return voter, pair, Choice(of=Pair.of_line(line), voter=voter, choice=said, shown_left=line["left"], at=line["at"])


def _why(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"without {error.args[0]}"
    return "no JSON" if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else str(error)


def append_line(file: Path, line: Mapping[str, Any]) -> None:
    """Adds a line, whole or not at all, and returns when it is on the disk.

    Raises:
        OSError: it could not be written; the file is as it was.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps(line, ensure_ascii=False).encode() + b"\n"
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        before = os.fstat(descriptor).st_size
        try:
            while data:
                data = data[os.write(descriptor, data) :]
            os.fsync(descriptor)
        except OSError:  # A full disk may have taken half of it.
            os.ftruncate(descriptor, before)
            raise
    finally:
        os.close(descriptor)


def undo_line(voter: str, pair: str, at: str) -> dict[str, str]:
    return {"voter": voter, "choice": UNDO, "pair": pair, "at": at}


def set_damaged_aside(file: Path) -> Sequence[Damaged]:
    """Moves the lines that cannot be read to ``damaged_file``, so that the next line begins where it should."""
    damaged = read_choices(file).damaged
    content = file.read_bytes() if file.is_file() else b""
    if not damaged and (not content or content.endswith(b"\n")):
        return ()
    wrong = {own.number for own in damaged}
    lines = content.split(b"\n")
    kept = [text for number, text in enumerate(lines, start=1) if number not in wrong and text.strip()]
    # First to where they stay: if this is interrupted, they are in both files rather than in none.
    for own in damaged:
        _append_bytes(damaged_file(file), own.text + b"\n")
    write_atomically(file, b"".join(text + b"\n" for text in kept))
    return damaged


def damaged_file(file: Path) -> Path:
    """Beside the file of choices: its lines that could not be read."""
    return file.with_name(f"{file.stem}.damaged{file.suffix}")


def _append_bytes(file: Path, data: bytes) -> None:
    with file.open("ab") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
