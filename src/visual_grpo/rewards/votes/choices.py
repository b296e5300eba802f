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
    """The record's metadata ``family``, else the prompt."""
    unit: str
    """Group key: prompts that share it are held out together."""
    first: str
    """Picture, relative to the folder of the file of choices."""
    second: str
    sources: tuple[str, ...] = ()
    """Pictures to edit, as ``first``."""

    @property
    def is_identical(self) -> bool:
        """True if both pictures are the same, which are named by their content."""
        return self.first == self.second

    @classmethod
    def of_line(cls, line: Mapping[str, Any]) -> Pair:
        """Raises KeyError for a missing value and TypeError for one that is not a text."""
        texts = {field.name: line[field.name] for field in fields(cls) if field.name != "sources"}
        for name, value in (*texts.items(), *(("sources", source) for source in line["sources"])):
            if not isinstance(value, str):
                raise TypeError(f"{name} must be a text, got {value!r}")
        return cls(**texts, sources=tuple(line["sources"]))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A voter's answer about a pair."""

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
        """1 if the first picture was preferred, 0 if the second, 0.5 for a tie, None if skipped."""
        return {FIRST: 1.0, SECOND: 0.0, TIE: 0.5}.get(self.choice)

    def line(self) -> dict[str, Any]:
        return {"voter": self.voter, "choice": self.choice, **asdict(self.of), "left": self.shown_left, "at": self.at}


@dataclass(frozen=True)
class Choices:
    standing: Sequence[Choice]
    """Each voter's last choice on each pair, in the order in which they were made, without undone ones."""
    damaged: Sequence[str]
    """Unreadable lines with their numbers and reasons."""


def read_choices(file: Path) -> Choices:
    """Reads a file of choices; a missing file has none. Raises UserError if it cannot be opened."""
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
        # Moves a repeated choice to the end.
        standing.pop((voter, pair), None)
        if choice is not None:
            standing[voter, pair] = choice
    return Choices(tuple(standing.values()), tuple(damaged))


def _parsed(text: bytes) -> tuple[str, str, Choice | None]:
    """Voter, pair and choice of a line; None = undone."""
    line = json.loads(text)
    if not isinstance(line, Mapping):
        raise TypeError("no JSON object")
    voter, answer, pair = line["voter"], line["choice"], line["pair"]
    if not isinstance(voter, str) or not isinstance(pair, str):
        raise TypeError("voter and pair must be texts")
    if answer == UNDO:
        return voter, pair, None
    if answer not in ANSWERS:
        raise ValueError(f"choice is none of {', '.join(ANSWERS)}, {UNDO}")
    choice = Choice(of=Pair.of_line(line), voter=voter, choice=answer, shown_left=line["left"], at=line["at"])
    return voter, pair, choice


def append_line(file: Path, line: Mapping[str, Any]) -> None:
    """Appends a line and flushes it to disk. Raises OSError, with the file unchanged, if it cannot be written."""
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


LONGEST_NAME = 60


class InvalidVoteError(Exception):
    """A request that is not possible; the message is shown on the page."""


class Ballot:
    """Hands out the pairs of a vote whose pictures differ, and stores each choice as soon as it is made.

    Order and sides are derived from ``seed``, voter and pair, so that a voter who returns sees the same.
    """

    def __init__(self, pairs: Sequence[Pair], file: Path, seed: int) -> None:
        self.file, self.seed = file, seed
        self.pairs = {pair.pair: pair for pair in pairs if not pair.is_identical}
        self.identical = [pair for pair in pairs if pair.is_identical]
        self.finished = threading.Event()
        """Set when every voter who has chosen something has judged all pairs, or one ends the vote."""
        self._here: set[str] = set()
        self._standing: dict[str, dict[str, Choice]] = {}
        """Voter -> pair -> choice, in the order in which they were made."""
        for choice in read_choices(file).standing:
            if choice.of.pair in self.pairs:
                self._standing.setdefault(choice.voter, {})[choice.of.pair] = choice

    def state(self, voter: str) -> dict[str, Any]:
        """Returns the page's content for ``voter``: the progress and the next pair, if any, with its sides."""
        pending = self.pending(voter)
        judged = len(self.pairs) - len(pending)
        shown = {"voter": voter, "judged": judged, "total": len(self.pairs), "pair": None}
        if not pending:
            return shown
        pair = self.pairs[min(pending, key=lambda name: self._turn(voter, name))]
        sides = (pair.first, pair.second) if self._left(voter, pair.pair) == FIRST else (pair.second, pair.first)
        return shown | {
            "pair": pair.pair,
            "prompt": pair.prompt,
            "sources": [Path(name).name for name in pair.sources],
            "left": Path(sides[0]).name,
            "right": Path(sides[1]).name,
        }

    def choose(self, voter: str, pair: str, answer: str) -> dict[str, Any]:
        """Stores a choice (``left``, ``right``, ``tie`` or ``skip``) and returns the new state.

        Raises InvalidVoteError, and OSError if the choice cannot be stored.
        """
        if not voter or len(voter) > LONGEST_NAME or not voter.isprintable() or voter != voter.strip():
            raise InvalidVoteError(f"a name has 1 to {LONGEST_NAME} characters that can be printed")
        if pair not in self.pairs:
            raise InvalidVoteError("this pair does not exist")
        choices = self._standing.setdefault(voter, {})
        if pair in choices:
            raise InvalidVoteError("this pair has already been judged")
        left = self._left(voter, pair)
        meant = {"left": left, "right": FIRST if left == SECOND else SECOND, TIE: TIE, SKIP: SKIP}
        if answer not in meant:
            raise InvalidVoteError(f"choice must be one of {', '.join(meant)}")
        choice = Choice(of=self.pairs[pair], voter=voter, choice=meant[answer], shown_left=left, at=_now())
        append_line(self.file, choice.line())
        choices[pair] = choice
        self._here.add(voter)
        if not any(self.pending(name) for name in self._here):
            self.finished.set()
        return self.state(voter)

    def undo(self, voter: str) -> dict[str, Any]:
        """Undoes the voter's latest choice and returns the new state. Raises like `choose`."""
        choices = self._standing.get(voter)
        if not choices:
            raise InvalidVoteError("there is nothing to take back")
        pair = next(reversed(choices))
        append_line(self.file, {"voter": voter, "choice": UNDO, "pair": pair, "at": _now()})
        del choices[pair]
        return self.state(voter)

    def pending(self, voter: str) -> list[str]:
        return [pair for pair in self.pairs if pair not in self._standing.get(voter, {})]

    def standing(self) -> list[Choice]:
        """Returns all voters' choices on these pairs, and a tie for each identical pair whose turn has passed.

        In a vote that is not finished, identical pairs are then as frequent among the choices as among the pairs.
        """
        standing: list[Choice] = []
        for voter, choices in self._standing.items():
            following = min((self._turn(voter, name) for name in self.pending(voter)), default=None)
            passed = [own for own in self.identical if following is None or self._turn(voter, own.pair) < following]
            standing += choices.values()
            standing += [Choice(of=own, voter=voter, choice=TIE, shown_left=FIRST, at="") for own in passed if choices]
        return standing

    def pictures(self) -> dict[str, Path]:
        """Returns name -> file of every picture that may be shown."""
        names = [name for pair in self.pairs.values() for name in (pair.first, pair.second, *pair.sources)]
        return {Path(name).name: self.file.parent / name for name in names}

    def _turn(self, voter: str, pair: str) -> bytes:
        return self._hash("order", voter, pair)

    def _left(self, voter: str, pair: str) -> str:
        return FIRST if self._hash("side", voter, pair)[0] % 2 else SECOND

    def _hash(self, *of: str) -> bytes:
        return hashlib.sha256("\0".join([str(self.seed), *of]).encode()).digest()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
