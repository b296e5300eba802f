"""Assigns records to splits by hashes of the record alone, so that adding records never moves another."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

from visual_grpo.common.errors import UserError
from visual_grpo.config import DataConfig

SEEN = "seen_prompts.json"
SEALED = "sealed"
"""The split that only promotions open: nothing else draws, scores or shows its records."""
OPEN = ("train", "eval", "held_out")
SPLITS = (*OPEN, SEALED)
FEW_PROMPTS = 10
"""An interval over fewer independent prompts is not to be relied on."""


def split_of(record_id: str, shared: str, data: DataConfig) -> str:
    """The split of a record; ``shared`` is its group key from `held_out_by`."""
    # Held-out keys are at one end of the range and sealed ones at the other, so that neither share takes from the other
    # when it is raised.
    place = _fraction("prompt", shared)
    if place < data.held_out_share:
        return "held_out"
    if place >= 1 - data.sealed_share:
        return SEALED
    # eval_share is a share of all records, but only those neither held out nor sealed can get into eval.
    if data.eval_share > 0 and _fraction("id", record_id) < data.eval_share / (
        1 - data.held_out_share - data.sealed_share
    ):
        return "eval"
    return "train"


def held_out_by(prompt: str | None, group: str | None = None, source_sha256: Sequence[str] = ()) -> str:
    """The group key of a record: records with the same key go to held_out, or to sealed, together or not at all.

    The key is ``group`` if given, else the prompt (None for queries) and the content of the source images: few
    instructions serve many images, and holding out every "make it red" would hold out a skill.
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


class SeenPrompts:
    """Hashes of the prompts that a training has seen, kept beside its adapters."""

    def __init__(self, hashes: Iterable[str] = ()) -> None:
        self.hashes = frozenset(hashes)

    @classmethod
    def of(cls, prompts: Iterable[str]) -> SeenPrompts:
        return cls(map(_hash, prompts))

    @classmethod
    def read(cls, folder: Path) -> SeenPrompts:
        file = folder / SEEN
        try:
            return cls(map(str, json.loads(file.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{file} is missing or damaged: expected a list of hashes. Train again.") from error

    def write(self, folder: Path) -> None:
        (folder / SEEN).write_text(json.dumps(sorted(self.hashes)), encoding="utf-8")

    def __contains__(self, prompt: str) -> bool:
        return _hash(prompt) in self.hashes

    def __or__(self, other: SeenPrompts) -> SeenPrompts:
        return SeenPrompts(self.hashes | other.hashes)


def _hash(prompt: str) -> str:
    """64 bits: among a million prompts, two share a hash with a probability of 3e-8."""
    return hashlib.blake2b(prompt_key(prompt).encode(), digest_size=8).hexdigest()
