"""Hashes of the prompts that a training has seen, kept beside its adapters so that later data can be judged by them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from visual_grpo.errors import UserError
from visual_grpo.records.split import prompt_key

FILE = "seen_prompts.json"


class SeenPrompts:
    """Prompts, as they are split: letter case, white space and Unicode's compatibility forms do not matter."""

    def __init__(self, hashes: Iterable[str] = ()) -> None:
        self.hashes = frozenset(hashes)

    @classmethod
    def of(cls, prompts: Iterable[str]) -> SeenPrompts:
        return cls(map(_hash, prompts))

    @classmethod
    def read(cls, folder: Path) -> SeenPrompts:
        """Reads those of the training that left ``folder``.

        Raises:
            UserError: the file is missing or damaged.
        """
        file = folder / FILE
        try:
            hashes = json.loads(file.read_text(encoding="utf-8"))
            return cls(str(text) for text in hashes)
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{file} is missing or damaged: expected a list of hashes. Train again.") from error

    def write(self, folder: Path) -> None:
        (folder / FILE).write_text(json.dumps(sorted(self.hashes)), encoding="utf-8")

    def __contains__(self, prompt: str) -> bool:
        return _hash(prompt) in self.hashes

    def __or__(self, other: SeenPrompts) -> SeenPrompts:
        return SeenPrompts(self.hashes | other.hashes)


def _hash(prompt: str) -> str:
    """64 bits: among a million prompts, two share a hash with a probability of 3e-8."""
    return hashlib.blake2b(prompt_key(prompt).encode(), digest_size=8).hexdigest()
