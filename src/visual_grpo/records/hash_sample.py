"""A sample that depends on what is in the data, not on its order: the items with the lowest hashes."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

DIGITS = 12
"""Hex digits (48 bits) of a hash: among a million items two share one with a probability of 0.2%."""


class HashSample(Generic[T]):
    """The ``size`` distinct keys with the lowest sha256, an item of each, and how often it came; bounded in memory.

    Two datasets that share most keys get samples that share most keys, too.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._kept: dict[str, T] = {}
        self._counts: Counter[str] = Counter()
        self._highest = "g"  # Above every hash.
        self._dropped = False

    def add(self, key: str, item: T) -> None:
        """Adds an item, which must be equal for equal keys."""
        hashed = hashlib.sha256(key.encode()).hexdigest()[:DIGITS]
        if hashed > self._highest:
            self._dropped = True
            return
        self._kept[hashed] = item
        self._counts[hashed] += 1
        if len(self._kept) >= 2 * self.size:
            self._drop()

    def items(self) -> Iterator[tuple[str, T, int]]:
        """(hash, item, number of times that its key was added) in the order of the hashes."""
        self._drop()
        for hashed in sorted(self._kept):
            yield hashed, self._kept[hashed], self._counts[hashed]

    @property
    def complete(self) -> bool:
        """Whether no key was left out."""
        self._drop()
        return not self._dropped

    def _drop(self) -> None:
        if len(self._kept) <= self.size:
            return
        lowest = sorted(self._kept)[: self.size]
        # What is dropped once is never kept again, so that the counts of the others are complete.
        self._kept = {hashed: self._kept[hashed] for hashed in lowest}
        self._counts = Counter({hashed: self._counts[hashed] for hashed in lowest})
        self._highest, self._dropped = lowest[-1], True
