"""The file of choices: one JSON object a line, only ever appended to.

A line says which of two pictures somebody preferred for a prompt. A voter's last line about a pair counts; one more
line takes a choice back. A line that cannot be read is named and ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from visual_grpo.common.errors import UserError

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
class Choices:
    standing: Sequence[Choice]
    """The last word of every voter on every pair, in the order in which it was said; nothing that was taken back."""
    damaged: Sequence[str]
    """Lines that cannot be read, with their numbers and why."""


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
            why = f"without {error.args[0]}" if isinstance(error, KeyError) else str(error)
            damaged.append(f"line {number} ({why}): {text[:_SHOWN].decode('utf-8', 'backslashreplace')}")
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


def append_line(file: Path, line: Mapping[str, Any]) -> None:
    """Adds a line and returns when it is on the disk.

    Raises:
        OSError: it could not be written; the file is as it was.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps(line, ensure_ascii=False).encode() + b"\n"
    with file.open("a+b", buffering=0) as stream:
        before = stream.seek(0, os.SEEK_END)
        if before:
            stream.seek(-1, os.SEEK_END)
            data = data if stream.read(1) == b"\n" else b"\n" + data  # A crash may have cut off the last line.
        try:
            while data:
                data = data[stream.write(data) :]
            os.fsync(stream.fileno())
        except OSError:  # A full disk may have taken half of it.
            stream.truncate(before)
            raise


def undo_line(voter: str, pair: str, at: str) -> dict[str, str]:
    return {"voter": voter, "choice": UNDO, "pair": pair, "at": at}
