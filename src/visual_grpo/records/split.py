"""Assigns records to splits; the split depends on the record alone.

It depends neither on the order of records, nor on other records, nor on the seed. So adding records never moves a
record to another split.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

SEALED = "sealed"
"""The split that only promotions open: nothing else draws, scores or shows its records."""
OPEN = ("train", "eval", "held_out")
SPLITS = (*OPEN, SEALED)
FEW_PROMPTS = 10
"""An interval over fewer independent prompts is not to be relied on."""

Shares = tuple[float, float, float]
"""data.eval_share, data.held_out_share and data.sealed_share."""
_STEPS = tuple(step / 20 for step in range(13))


@dataclass(frozen=True, kw_only=True)
class Splitter:
    """Assigns records to train, eval, held_out and sealed by a sha256 hash."""

    eval_share: float
    """Share of all records; their prompts may also occur in train."""
    held_out_share: float
    """Share of group keys (see `held_out_by`; usually prompts); all records of a held-out key are held out."""
    sealed_share: float = 0.0
    """Share of group keys whose records are sealed; none of them is held out."""

    def __call__(self, record_id: str, shared: str) -> str:
        """The split of a record; ``shared`` is its group key from `held_out_by`."""
        # Held-out keys are at one end of the range and sealed ones at the other, so that neither share takes from the
        # other when it is raised.
        place = _fraction("prompt", shared)
        if place < self.held_out_share:
            return "held_out"
        if place >= 1 - self.sealed_share:
            return SEALED
        # eval_share is a share of all records, but only those neither held out nor sealed can get into eval.
        if self.eval_share > 0 and _fraction("id", record_id) < self.eval_share / (
            1 - self.held_out_share - self.sealed_share
        ):
            return "eval"
        return "train"


def held_out_by(prompt: str | None, group: str | None = None, source_sha256: Sequence[str] = ()) -> str:
    """The group key of a record: records with the same key go to held_out, or to sealed, together or not at all.

    The key is ``group`` if given, else the prompt and, for edits, the content of the source images: few instructions
    serve many images, and holding out every "make it red" would hold out a skill. With a prompt of None the key is the
    sources alone: queries about the same image are held out together, else the image would be seen in training.
    """
    if group is not None:
        return f"group\0{prompt_key(group)}"
    return "\0".join(["" if prompt is None else prompt_key(prompt), *source_sha256])


def prompt_key(prompt: str) -> str:
    """Normalises a prompt: letter case, white space and Unicode compatibility forms (NFKC) do not matter."""
    return " ".join(unicodedata.normalize("NFKC", prompt).casefold().split())


def _fraction(kind: str, text: str) -> float:
    """A number in [0, 1), uniform over texts: the first 53 bits of a sha256 hash."""
    digest = hashlib.sha256(f"{kind}\0{text}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


def split_counts(keys: Sequence[tuple[str, str]], shares: Shares) -> Counter[str]:
    """Counts the records that each split gets; ``keys`` are (id, group key) of each record."""
    splitter = Splitter(eval_share=shares[0], held_out_share=shares[1], sealed_share=shares[2])
    return Counter(splitter(record_id, shared) for record_id, shared in keys)


def is_enough(counts: Counter[str]) -> bool:
    """True if there is a record to train on and one to evaluate."""
    return counts["train"] > 0 and counts["eval"] + counts["held_out"] > 0


def feasible_shares(keys: Sequence[tuple[str, str]], shares: Shares) -> Shares | None:
    """The nearest shares that leave no split empty, else the nearest that are enough; None if there are none.

    The sealed share stays as it is, or is 0 if no others do with it.
    """
    for sealed in dict.fromkeys((shares[2], 0.0)):
        wanted = SPLITS if sealed > 0 else OPEN
        grid = [(own, held, sealed) for own in _STEPS for held in _STEPS if own + held + sealed < 1]
        nearest = sorted(grid, key=lambda own: abs(own[0] - shares[0]) + abs(own[1] - shares[1]))
        counts = {own: split_counts(keys, own) for own in nearest}
        found = next((own for own in nearest if all(counts[own][split] for split in wanted)), None)
        found = found or next((own for own in nearest if is_enough(counts[own])), None)
        if found is not None:
            return found
    return None
