"""Keeps what each voter has still to judge, and stores every choice as soon as it is made."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from visual_grpo.rewards.votes.choices import (
    FIRST,
    SECOND,
    SKIP,
    TIE,
    Choice,
    Pair,
    append_line,
    read_choices,
    undo_line,
)

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
