"""The Hugging Face image folder: ``metadata.jsonl`` or ``metadata.csv`` next to the images that it names.

Columns: ``file_name`` (relative to the metadata file) and ``text`` (or ``prompt`` or ``caption``); other columns
become metadata (as text in CSV). Metadata files may be in nested folders and in split folders such as ``train``.
https://huggingface.co/docs/datasets/image_dataset
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from visual_grpo.errors import UserError
from visual_grpo.records.csv_text import csv_header, csv_rows
from visual_grpo.records.files import is_left_out, left_out, missing_file, walk
from visual_grpo.records.guard import Guard
from visual_grpo.records.on_disk import sorted_on_disk
from visual_grpo.records.raw import Item, Note, Place, RawRecord, Rejected, Rejection, shorten
from visual_grpo.records.text import count_lines, json_object, read_lines

LOOKS_FOR = "metadata.jsonl or metadata.csv (also in folders below) with file_name and text, prompt or caption"

_NAMES = ("metadata.jsonl", "metadata.csv")
_TEXT_KEYS = ("text", "prompt", "caption")
_SPLIT_FOLDERS = frozenset({"train", "validation", "valid", "val", "dev", "eval", "test"})


def find(path: Path, guard: Guard) -> Path | None:
    """A metadata file, or a folder with at least one below it."""
    if path.is_dir():
        return path if any(_is_metadata(name) for name in walk(path, guard)) else None
    fits = path.name.lower() == "metadata.jsonl" or path.suffix.lower() == ".csv"
    return path if fits and path.is_file() else None


def missing(path: Path, names: Sequence[str]) -> str:
    """Why `find` found nothing; ``names`` are of the files below the folder."""
    return " and ".join(missing_file(name, path, names) for name in _NAMES)


def count(path: Path, guard: Guard) -> int:
    files = (found for found in _metadata_files(path, guard) if not isinstance(found, Rejection))
    return sum(count_lines(file) - (file.suffix.lower() == ".csv") for file, _ in files)


def read(path: Path, guard: Guard) -> Iterator[Item]:
    """Yields one item for each row of every metadata file, in the order of their paths."""
    splits = set()
    for found in _metadata_files(path, guard):
        if isinstance(found, Rejection):
            yield found
            continue
        file, name = found
        split = next((part for part in Path(name).parts[:-1] if part.lower() in _SPLIT_FOLDERS), None)
        if split is not None:
            splits.add(split)
        for number, row in _rows(file, guard.max_record_bytes):
            place = Place(name, number)
            if isinstance(row, Rejected):
                yield row.at(place)
            else:
                yield _record(row, place, file.parent, split)
    if splits:
        yield Note(
            f"the split folders {', '.join(sorted(splits))} are only stored as metadata['split'];"
            " data.eval_share and data.held_out_share determine the splits"
        )


def _is_metadata(name: str) -> bool:
    return name.rpartition("/")[2].lower() in _NAMES


def _metadata_files(path: Path, guard: Guard) -> Iterator[tuple[Path, str] | Rejection]:
    """Yields (file, its path relative to the data's folder), and a rejection of what must not be read.

    Raises:
        UserError: a folder has both kinds of metadata.
    """
    if path.is_file():
        yield path, path.name
        return
    previous = None
    for name in sorted_on_disk(name for name in walk(path, guard) if _is_metadata(name) or is_left_out(name)):
        if is_left_out(name):
            yield left_out(name, path, guard)
            continue
        file = path / name
        try:
            guard.check_inside(file, name)
            guard.check_ordinary(file, name)
        except Rejected as rejected:
            yield rejected.at(Place(name))
            continue
        if file.parent == previous:
            raise UserError(f"{file.parent}: has both metadata.jsonl and metadata.csv. Keep one of them.")
        previous = file.parent
        yield file, name


def _rows(file: Path, longest: int) -> Iterator[tuple[int, Mapping[str, Any] | Rejected]]:
    if file.suffix.lower() == ".csv":
        _check_header(file, longest)
        yield from csv_rows(file, longest)
        return
    for line in read_lines(file, longest):
        if line.text.strip():
            try:
                yield line.number, json_object(line)
            except Rejected as rejected:
                yield line.number, rejected


def _check_header(file: Path, longest: int) -> None:
    header = csv_header(file, longest)
    if "file_name" not in header or not set(header) & set(_TEXT_KEYS):
        raise UserError(
            f"{file}: the header must name file_name and one of {', '.join(_TEXT_KEYS)}, separated by commas;"
            f" it is {shorten(str(header))}. Prompts without images go into prompts.txt, one a line."
        )


def _record(row: Mapping[str, Any], place: Place, folder: Path, split: str | None) -> Item:
    text_key = next((key for key in _TEXT_KEYS if key in row), "text")
    if row.get("file_name") is None:
        return Rejected("missing_target", "file_name is missing", "Name the image, relative to the metadata file").at(
            place
        )
    extra = {key: value for key, value in row.items() if key not in ("file_name", "id", text_key)}
    if split is not None:
        extra.setdefault("split", split)
    return RawRecord(
        place=place,
        folder=folder,
        id=row.get("id"),
        prompt=row.get(text_key),
        target_image=row["file_name"],
        extra=extra,
    )
