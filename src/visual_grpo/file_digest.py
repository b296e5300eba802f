"""The sha256 of a file's content."""

from __future__ import annotations

import hashlib
from pathlib import Path


def file_digest(file: Path) -> str:
    """64 hex digits; the file is read in parts. Raises OSError where it cannot be read."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
