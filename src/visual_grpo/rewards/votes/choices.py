"""The append-only file of choices, one JSON object a line, and the pairs that each voter still has to judge.

A line records which of two pictures a voter preferred for a prompt. A voter's last line about a pair counts; an undo
line withdraws a choice. Unreadable lines are reported and ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
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


LONGEST_NAME = 60


class RefusedError(Exception):
    """A request that is not possible; the message is shown on the page."""


class Ballot:
    """The pairs, and what was said of them.

    Order and sides are random, and fixed by ``seed``, the voter and the pair: who goes on later sees the same.
    """

    def __init__(self, pairs: Sequence[Pair], file: Path, seed: int) -> None:
        self.file, self.seed = file, seed
        self.pairs = {pair.pair: pair for pair in pairs}
        self.finished = threading.Event()
        """Set when everybody who chose has judged all, or somebody ends the vote."""
        self._here: set[str] = set()
        self._standing: dict[str, dict[str, Choice]] = {}
        """Voter -> pair -> choice, in the order in which they were made."""
        for choice in read_choices(file).standing:
            if choice.of.pair in self.pairs:
                self._standing.setdefault(choice.voter, {})[choice.of.pair] = choice

    def state(self, voter: str) -> dict[str, Any]:
        """The page's content for ``voter``: the next pair, if there is one, with its sides, and the progress."""
        pending = self.pending(voter)
        judged = len(self.pairs) - len(pending)
        shown = {"voter": voter, "judged": judged, "total": len(self.pairs), "pair": None}
        if not pending:
            return shown
        pair = self.pairs[min(pending, key=lambda name: self._hash("order", voter, name))]
        sides = (pair.first, pair.second) if self._left(voter, pair.pair) == FIRST else (pair.second, pair.first)
        return shown | {
            "pair": pair.pair,
            "prompt": pair.prompt,
            "sources": [Path(name).name for name in pair.sources],
            "left": Path(sides[0]).name,
            "right": Path(sides[1]).name,
        }

    def choose(self, voter: str, pair: str, said: str) -> dict[str, Any]:
        """Stores a choice (``left``, ``right``, ``tie`` or ``skip``); returns the state after it.

        Raises RefusedError, also for a second click on a pair, and OSError where it could not be stored.
        """
        if not voter or len(voter) > LONGEST_NAME or not voter.isprintable() or voter != voter.strip():
            raise RefusedError(f"a name has 1 to {LONGEST_NAME} characters that can be printed")
        if pair not in self.pairs:
            raise RefusedError("there is no such pair")
        own = self._standing.setdefault(voter, {})
        if pair in own:
            raise RefusedError("this pair is judged already")
        left = self._left(voter, pair)
        meant = {"left": left, "right": FIRST if left == SECOND else SECOND, TIE: TIE, SKIP: SKIP}
        if said not in meant:
            raise RefusedError(f"choice must be one of {', '.join(meant)}")
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        choice = Choice(of=self.pairs[pair], voter=voter, choice=meant[said], shown_left=left, at=at)
        append_line(self.file, choice.line())
        own[pair] = choice
        self._here.add(voter)
        if not any(self.pending(name) for name in self._here):
            self.finished.set()
        return self.state(voter)

    def undo(self, voter: str) -> dict[str, Any]:
        """Takes the voter's latest choice back; returns the state after it. Raises as `choose`."""
        own = self._standing.get(voter)
        if not own:
            raise RefusedError("there is nothing to take back")
        pair = next(reversed(own))
        append_line(self.file, undo_line(voter, pair, datetime.now(UTC).isoformat(timespec="milliseconds")))
        del own[pair]
        return self.state(voter)

    def pending(self, voter: str) -> list[str]:
        """The pairs that ``voter`` has still to judge."""
        return [pair for pair in self.pairs if pair not in self._standing.get(voter, {})]

    def standing(self) -> list[Choice]:
        """Every voter's choices on these pairs."""
        return [choice for own in self._standing.values() for choice in own.values()]

    def pictures(self) -> dict[str, Path]:
        """Name -> file of every picture that may be shown."""
        names = [name for pair in self.pairs.values() for name in (pair.first, pair.second, *pair.sources)]
        return {Path(name).name: self.file.parent / name for name in names}

    def _left(self, voter: str, pair: str) -> str:
        return FIRST if self._hash("side", voter, pair)[0] % 2 else SECOND

    def _hash(self, *of: str) -> bytes:
        return hashlib.sha256("\0".join([str(self.seed), *of]).encode()).digest()
