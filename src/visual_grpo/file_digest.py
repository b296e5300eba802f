"""The sha256 of a file's content."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path


def file_digest(file: Path) -> str:
    """64 hex digits; the file is read in parts. Raises OSError where it cannot be read."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_once(file: Path) -> str:
    """`file_digest`, read once in a process while the file's size and time of change stay."""
    facts = file.stat()
    return _digest(file.resolve(), facts.st_size, facts.st_mtime_ns)


@cache
def _digest(file: Path, size: int, changed: int) -> str:
    return file_digest(file)
