"""Looks up files by the number in their name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath
from typing import Self

from visual_grpo.records.on_disk import temporary_database

_LARGEST = 2**63 - 1


class NumberedFiles:
    """Finds ``7.png`` or ``007.jpg`` by 7; the names are stored on disk."""

    def __init__(self, names: Iterable[str]) -> None:
        self._database = temporary_database()
        self._database.execute("CREATE TABLE files (number INTEGER, name BLOB)")
        self._database.executemany("INSERT INTO files VALUES (?, ?)", _numbered(names))
        self._database.execute("CREATE INDEX by_number ON files (number)")

    def named(self, number: int) -> list[str]:
        """Names of the files with this number."""
        rows = self._database.execute("SELECT name FROM files WHERE number = ? ORDER BY name", (number,))
        return [name.decode("utf-8", "surrogateescape") for (name,) in rows]

    def count_from(self, number: int) -> int:
        """The number of files with this number or a greater one."""
        counts = self._database.execute("SELECT count(*) FROM files WHERE number >= ?", (number,))
        return int(counts.fetchone()[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()


def _numbered(names: Iterable[str]) -> Iterable[tuple[int, bytes]]:
    for name in names:
        stem = PurePath(name).stem
        if stem.isascii() and stem.isdigit() and len(stem) < len(str(_LARGEST)):
            yield int(stem), name.encode("utf-8", "surrogateescape")
