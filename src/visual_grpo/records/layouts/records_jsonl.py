"""``records.jsonl``: one JSON object on each line, image paths relative to the file.

``source_image`` is a path or a list of paths: the images that the prompt edits. Records with the same ``group`` are
held out together or not at all, whatever their prompts (see `records.split`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from visual_grpo.records.files import missing_file
from visual_grpo.records.guard import Guard
from visual_grpo.records.raw import Item, Place, RawRecord, Rejected
from visual_grpo.records.text import count_lines, json_object, read_lines

KEYS = ("prompt", "id", "target_image", "source_image", "group", "metadata")

LOOKS_FOR = f"records.jsonl with the keys prompt and, where you have them, {', '.join(KEYS[1:])}"


def find(path: Path, guard: Guard) -> Path | None:
    """The file itself, or ``records.jsonl`` in the folder."""
    if path.is_dir():
        path = path / "records.jsonl"
    fits = path.suffix.lower() == ".jsonl" and path.name.lower() != "metadata.jsonl"
    return path if fits and path.is_file() else None


def missing(path: Path, names: Sequence[str]) -> str:
    """Why `find` found nothing; ``names`` are of the files below the folder."""
    return missing_file("records.jsonl", path, names)


def count(path: Path, guard: Guard) -> int:
    return count_lines(path)


def read(path: Path, guard: Guard) -> Iterator[Item]:
    """Yields one item for each line that is not blank. Unknown keys go to ``extra``."""
    for line in read_lines(path, guard.max_record_bytes):
        if not line.text.strip():
            continue
        place = Place(path.name, line.number)
        try:
            row = json_object(line)
        except Rejected as rejected:
            yield rejected.at(place)
            continue
        yield RawRecord(
            place=place,
            folder=path.parent,
            prompt=row.get("prompt"),
            id=row.get("id"),
            target_image=row.get("target_image"),
            source_images=row.get("source_image"),
            group=row.get("group"),
            metadata=row.get("metadata"),
            extra={key: value for key, value in row.items() if key not in KEYS},
        )
