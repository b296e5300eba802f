"""Sets and sorted lists that grow with the data and therefore stay on disk.

Python's own sets would hold every id of the dataset in memory. An SQLite file in the temporary folder
keeps memory at its page cache (2 MB) however many there are, and goes when it is closed.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Iterator
from typing import Self


class DiskSet:
    """A set of strings, known by 16-byte digests, in a temporary SQLite file."""

    def __init__(self) -> None:
        self._database = temporary_database()
        self._database.execute("CREATE TABLE keys (digest BLOB PRIMARY KEY) WITHOUT ROWID")

    def add(self, key: str) -> bool:
        """Adds a key; False if it was there already."""
        cursor = self._database.execute("INSERT OR IGNORE INTO keys VALUES (?)", (_digest(key),))
        return cursor.rowcount == 1

    def __contains__(self, key: str) -> bool:
        found = self._database.execute("SELECT 1 FROM keys WHERE digest = ?", (_digest(key),))
        return found.fetchone() is not None

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def sorted_on_disk(names: Iterable[str]) -> Iterator[str]:
    """Yields names in the order of their UTF-8 bytes, whatever order they came in."""
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
    """An empty database in a nameless temporary file, without a journal: it need not survive."""
    database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    database.execute("PRAGMA journal_mode = OFF")
    database.execute("PRAGMA temp_store = FILE")
    database.execute("BEGIN")
    return database


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=16).digest()
