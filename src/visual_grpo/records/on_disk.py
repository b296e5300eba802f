"""Counts strings on disk: a set of every id of a large dataset would not fit into memory."""

from __future__ import annotations

import hashlib
import sqlite3
from typing import Self


class DiskCounter:
    """Counts strings by their 16-byte digests in a temporary SQLite file, which ends with the process."""

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("PRAGMA temp_store = FILE")
        self._database.execute("BEGIN")
        self._database.execute("CREATE TABLE keys (digest BLOB PRIMARY KEY, seen INTEGER) WITHOUT ROWID")

    def add(self, key: str) -> int:
        """Counts a key; returns its new count, 1 for the first time."""
        seen = self.count(key) + 1
        self._database.execute("REPLACE INTO keys VALUES (?, ?)", (_digest(key), seen))
        return seen

    def count(self, key: str) -> int:
        """Returns how often a key has been added."""
        found = self._database.execute("SELECT seen FROM keys WHERE digest = ?", (_digest(key),)).fetchone()
        return 0 if found is None else int(found[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
