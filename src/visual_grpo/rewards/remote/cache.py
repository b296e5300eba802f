"""Answers on disk, found again by what was asked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from visual_grpo.errors import UserError
from visual_grpo.files import write_atomically


def key_of(*parts: bytes | str) -> str:
    """The sha256 of what was asked, in hexadecimal."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()


class AnswerCache:
    """A folder with one small JSON file an answer; several processes may use it at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> Any:
        """The answer; None if there is none, or only the rest of one."""
        try:
            return json.loads(self._file(key).read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        except OSError as error:
            raise UserError(f"the cache {self.folder} cannot be read: {error}") from error

    def put(self, key: str, answer: Mapping[str, Any]) -> None:
        """Stores it in one step: nobody ever reads half of it."""
        file = self._file(key)
        try:
            write_atomically(file, json.dumps(answer))
        except OSError as error:
            raise UserError(f"the cache {self.folder} cannot be written: {error}") from error

    def _file(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key[2:]}.json"
