"""Counters and sorting on disk, for collections that grow with the dataset.

Python sets and dicts would hold every id of the dataset in memory. A temporary SQLite file needs only its page cache
(2 MB) however many there are, and is deleted when it is closed.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Iterator
from typing import Self


class DiskCounter:
    """Counts strings by their 16-byte digests in a temporary SQLite file."""

    def __init__(self) -> None:
        self._database = temporary_database()
        self._database.execute("CREATE TABLE keys (digest BLOB PRIMARY KEY, seen INTEGER) WITHOUT ROWID")

    def add(self, key: str) -> int:
        """Counts a key; returns its new count, 1 for the first time."""
        seen = self.count(key) + 1
        self._database.execute("REPLACE INTO keys VALUES (?, ?)", (_digest(key), seen))
        return seen

    def count(self, key: str) -> int:
        """How often a key has been seen."""
        found = self._database.execute("SELECT seen FROM keys WHERE digest = ?", (_digest(key),)).fetchone()
        return 0 if found is None else int(found[0])

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def sorted_on_disk(names: Iterable[str]) -> Iterator[str]:
    """Yields the names sorted by their UTF-8 bytes."""
    database = temporary_database()
    try:
        database.execute("CREATE TABLE names (name BLOB)")
        rows = ((name.encode("utf-8", "surrogateescape"),) for name in names)
        database.executemany("INSERT INTO names VALUES (?)", rows)
        for (name,) in database.execute("SELECT name FROM names ORDER BY name"):
            yield name.decode("utf-8", "surrogateescape")
    finally:
        database.close()


def temporary_database() -> sqlite3.Connection:
    """An empty database in an anonymous temporary file; without a journal, because it need not survive a crash."""
    database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    database.execute("PRAGMA journal_mode = OFF")
    database.execute("PRAGMA temp_store = FILE")
    database.execute("BEGIN")
    return database


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
