"""Small datasets for the tests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image


def picture(path: Path, size: tuple[int, int] = (40, 40), colour: str | tuple[int, ...] = "red") -> Path:
    """Writes a plain image in the format of its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


def jsonl(path: Path, rows: Iterable[Mapping[str, Any] | str]) -> Path:
    """Writes one line per item: mappings as JSON, text unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path
