"""Keys that look like known ones: a record without its target would train as another record."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from visual_grpo.errors import nearest, nearest_hint
from visual_grpo.records.raw import Rejected, shorten

_ALIKE = 0.8
"""Similarity of two keys from which one may be a misspelling of the other."""

_LONGEST = 50
"""Characters; a longer key resembles none, and comparing it would take long."""

_BETWEEN_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[\W_]+")


def refuse_misspelt(extra: Collection[str], given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Rejects a key that looks like a known one which is missing.

    Args:
        extra: the record's keys that are no fields.
        given: the values of its fields by all of their names.
        known: the names that are suggested.
    """
    for key in _unknown(extra, known):
        meant = _meant(key, tuple(known))
        if meant is not None and given.get(meant) is None:
            raise Rejected("unknown_key", f"there is no field {shorten(key)!r}. Did you mean {meant!r}?", "Rename it")


@lru_cache(maxsize=4096)
def _meant(key: str, known: tuple[str, ...]) -> str | None:
    """The known key that ``key`` is a misspelling of, or another spelling: ``source-image``, ``targetImage``."""
    words = _words(key)
    if not key[:1].isalnum():  # People comment a key out with a sign.
        return None
    meant = nearest("_".join(words), known, cutoff=_ALIKE)
    # Nearly all short words resemble id.
    if meant in (None, "id"):
        return None
    # One more word, as in prompt_zh, makes another name; no word more, as in targetimage, is a way to write it.
    return meant if len(words) in (1, len(_words(str(meant)))) else _joined(words, known)


def resembling(keys: Collection[str], known: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The keys that resemble a known one, with a hint at it."""
    hints = ((key, _hint(key, tuple(known))) for key in _unknown(keys, known))
    return tuple((key, hint) for key, hint in hints if hint)


def _unknown(keys: Collection[str], known: Sequence[str]) -> list[str]:
    return [key for key in keys if len(key) <= _LONGEST and key not in known]


@lru_cache(maxsize=4096)
def _hint(key: str, known: tuple[str, ...]) -> str:
    return nearest_hint(key, known, cutoff=_ALIKE)


def _words(key: str) -> list[str]:
    return [word.lower() for word in _BETWEEN_WORDS.split(key) if word]


def _joined(words: list[str], known: tuple[str, ...]) -> str | None:
    """``meta_data`` is metadata."""
    return next((key for key in known if key.replace("_", "") == "".join(words)), None)
