"""Which split a record belongs to: a function of the record alone.

Neither the order of the records, nor the other records, nor the seed has a say, so that adding records
never moves one from one split to another.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

SPLITS = ("train", "eval", "held_out")


@dataclass(frozen=True, kw_only=True)
class Splitter:
    """Deals records to train, eval and held_out by their sha256."""

    eval_share: float
    """Share of all records; their prompts may also occur in train."""
    held_out_share: float
    """Share of prompts, or what `held_out_by` puts in their place; all records of such a prompt are held out."""

    def __post_init__(self) -> None:
        if self.eval_share + self.held_out_share >= 1:
            raise ValueError(
                "eval_share + held_out_share must be below 1, so that something is left to train on;"
                f" got {self.eval_share} + {self.held_out_share}"
            )

    def __call__(self, record_id: str, shared: str) -> str:
        """The split of a record; ``shared`` is what `held_out_by` says of it."""
        if _fraction("prompt", shared) < self.held_out_share:
            return "held_out"
        # eval takes its share of all records from those that are not held out
        if _fraction("id", record_id) < self.eval_share / (1 - self.held_out_share):
            return "eval"
        return "train"


def held_out_by(prompt: str | None, group: str | None = None, source_sha256: Sequence[str] = ()) -> str:
    """What the records that must be held out together have in common.

    The ``group`` that they name; else their prompt, for an edit together with the content of its sources: a
    few instructions serve many images, and holding out "make it red" as such would hold out a skill. A prompt of
    None leaves the sources alone: questions about one image are held out together, or it was seen in training.
    """
    if group is not None:
        return f"group\0{prompt_key(group)}"
    return "\0".join(["" if prompt is None else prompt_key(prompt), *source_sha256])


def prompt_key(prompt: str) -> str:
    """What makes two prompts the same: neither letter case, spacing nor the form of a character counts."""
    return " ".join(unicodedata.normalize("NFKC", prompt).casefold().split())


def _fraction(kind: str, text: str) -> float:
    """A number in [0, 1), uniform over texts: the first 53 bits of a sha256."""
    digest = hashlib.sha256(f"{kind}\0{text}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53
