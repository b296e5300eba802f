"""Manifests and profiles for the tests, made without a data preparation."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from visual_grpo.data.drift import Profile, profile_of
from visual_grpo.data.table import RecordTable, write_manifest

ANIMALS = ("cat", "dog", "horse", "bear", "owl", "whale", "crane", "lizard", "snail", "tiger")
PLACES = ("house", "lake", "wood", "street", "mountain", "bridge", "harbour", "field", "desert", "island", "market")
TIMES = ("morning", "evening", "autumn", "winter", "rain", "snow", "fog", "sun", "moonlight", "storm", "spring")


def prompts(count: int = 300, seed: int = 0) -> list[str]:
    """Different ones."""
    found = [f"a {animal} at the {place} in {time}" for animal in ANIMALS for place in PLACES for time in TIMES]
    return random.Random(seed).sample(found, count)


def table(folder: Path, rows: Iterable[str | dict[str, Any]]) -> RecordTable:
    """The records with these prompts or columns."""
    columns = [{"prompt": row} if isinstance(row, str) else row for row in rows]
    path = folder / "records.parquet"
    path.unlink(missing_ok=True)
    write_manifest(path, ({"id": str(n), "split": "train", "metadata": "{}", **row} for n, row in enumerate(columns)))
    return RecordTable(path)


def profile(folder: Path, rows: Iterable[str | dict[str, Any]]) -> Profile:
    return profile_of(table(folder, rows))
