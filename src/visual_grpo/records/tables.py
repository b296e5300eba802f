"""Rows of tables: JSON lines, JSON, CSV, Parquet, Arrow, a `Dataset` on disk or on the Hugging Face hub.

The library `datasets` reads Parquet, Arrow, saved and hub datasets. JSON lines and CSV are read here: its readers need
columns of one type and give up a whole file for one bad line, where only that record should be rejected.
"""

from __future__ import annotations

import csv
import glob
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_grpo.config import Task
from visual_grpo.errors import UserError
from visual_grpo.records.columns import PROMPTS, QUERIES, record_of
from visual_grpo.records.guard import Guard
from visual_grpo.records.raw import EmbeddedImage, Item, Note, Place, Rejected, shorten
from visual_grpo.records.text import check_line, check_utf8, json_object, open_text, read_lines, refuse_utf16, too_long

if TYPE_CHECKING:
    import datasets

HUB = "hf://datasets/"
"""Prefix of ``data.path`` for a dataset of the Hugging Face hub."""
SUFFIXES = (".parquet", ".arrow", ".csv", ".tsv", ".jsonl", ".json")
_BY_LIBRARY = (".parquet", ".arrow")
_SAVED = ("dataset_dict.json", "state.json")
"""Files that ``save_to_disk`` leaves."""
_SPLIT_FOLDERS = frozenset({"train", "validation", "valid", "val", "dev", "eval", "test"})
_NULLS = frozenset({"", "nan", "null", "none", "n/a", "<na>"})
"""Spellings of missing values in spreadsheets and pandas, in lower case."""
_BATCH = 16
"""Rows of a Parquet table in memory at a time."""

Row = Mapping[str, Any] | Rejected


def find_records(path: Path) -> Path | None:
    """A file of JSON lines, or ``records.jsonl`` in the folder."""
    if path.is_dir():
        path = path / "records.jsonl"
    fits = path.suffix.lower() == ".jsonl" and path.name.lower() != "metadata.jsonl"
    return path if fits and path.is_file() else None


def read_records(path: Path, guard: Guard, task: Task) -> Iterator[Item]:
    return _items(path, path.name, guard, task, canonical=True)


def find_metadata(path: Path, guard: Guard) -> Path | None:
    """A metadata file of the hub's image folders, or a folder with at least one below it."""
    if path.is_dir():
        return path if any(is_metadata(name) for name in guard.walk(path)) else None
    return path if path.is_file() and is_metadata(path.name) else None


def read_metadata(path: Path, guard: Guard, task: Task) -> Iterator[Item]:
    """Yields the rows of every ``metadata.jsonl`` and ``metadata.csv``; the name of a split folder becomes metadata.

    Raises:
        UserError: a folder has both.
    """
    if path.is_file():
        yield from _items(path, path.name, guard, task)
        return
    refused: list[Rejected] = []
    splits, previous = set(), None
    for name in filter(is_metadata, guard.walk(path, refused)):
        file = path / name
        try:
            guard.check_place(file, name)
        except Rejected as rejected:
            yield rejected.at(Place(name))
            continue
        if file.parent == previous:
            raise UserError(f"{file.parent}: has both metadata.jsonl and metadata.csv. Keep one of them.")
        previous = file.parent
        split = next((part for part in Path(name).parts[:-1] if part.lower() in _SPLIT_FOLDERS), None)
        splits.add(split)
        yield from _items(file, name, guard, task, more={} if split is None else {"split": split})
    yield from refused
    if splits - {None}:
        yield Note(
            f"the split folders {', '.join(sorted(filter(None, splits)))} are only stored as metadata['split'];"
            " data.eval_share and data.held_out_share determine the splits"
        )


def find_table(path: Path) -> Path | None:
    """A table, a folder with tables (also in its subfolder ``data``) or one that ``save_to_disk`` has left."""
    if path.is_dir():
        return path if is_saved(path) or _tables(path) else None
    return path if path.is_file() and path.suffix.lower() in SUFFIXES else None


def read_table(path: Path, guard: Guard, task: Task, split: str | None = None) -> Iterator[Item]:
    if is_saved(path):
        yield from _rows_of(_opened(path, split), path.name, path, guard, task)
        return
    for file in [path] if path.is_file() else _tables(path):
        if file != path:
            guard.require(file)
        yield from _items(file, file.name if file == path else file.relative_to(path).as_posix(), guard, task)


def read_hub(path: str, guard: Guard, task: Task, split: str | None, revision: str | None) -> Iterator[Item]:
    """Yields the rows of ``hf://datasets/OWNER/NAME``, which `datasets` downloads into its cache once."""
    import datasets

    with _said(path):
        found = datasets.load_dataset(path.removeprefix(HUB), split=split, revision=revision)
    return _rows_of(_one_split(found, path, split), path.removeprefix(HUB), None, guard, task)


def count_table(path: Path, split: str | None) -> int | None:
    """The number of rows, if it is known without reading them."""
    if is_saved(path):
        return int(_opened(path, split).num_rows)
    files = [path] if path.is_file() else _tables(path)
    if any(file.suffix.lower() != ".parquet" for file in files):
        return None
    import pyarrow.parquet as pq

    with _said(path):
        return sum(pq.read_metadata(file).num_rows for file in files)


def is_saved(path: Path) -> bool:
    return any((path / name).is_file() for name in _SAVED)


def is_metadata(name: str) -> bool:
    return name.rpartition("/")[2].lower() in ("metadata.jsonl", "metadata.csv")


def _tables(path: Path) -> list[Path]:
    found = [file for folder in (path, path / "data") for file in sorted(folder.glob("[!.]*"))]
    return [file for file in found if file.suffix.lower() in SUFFIXES and (file.suffix != ".json" or _is_list(file))]


def _is_list(file: Path) -> bool:
    """True if a JSON file is a list, as other JSON files beside data seldom are."""
    if not file.is_file():
        return False
    with open_text(file) as text:
        return text.read(100).lstrip().startswith("[")


def _items(
    file: Path, name: str, guard: Guard, task: Task, *, canonical: bool = False, more: Mapping[str, Any] | None = None
) -> Iterator[Item]:
    if file.suffix.lower() in _BY_LIBRARY:
        yield from _rows_of(_streamed(file), name, file.parent, guard, task)
        return
    for number, row in _text_rows(file, guard.max_record_bytes):
        place = Place(name, number)
        if isinstance(row, Rejected):
            yield row.at(place)
        else:
            yield record_of({**(more or {}), **row}, place, file.parent, task, canonical=canonical)


def _text_rows(file: Path, longest: int) -> Iterator[tuple[int, Row]]:
    suffix = file.suffix.lower()
    if suffix in (".csv", ".tsv"):
        yield from _csv_rows(file, longest)
    elif suffix == ".json":
        try:
            with open_text(file) as text:
                found = json.load(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file} is not valid JSON ({error}). Correct it.") from error
        if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
            raise UserError(f"{file}: expected a list of objects, one a record. Use records.jsonl instead.")
        yield from enumerate(found, 1)
    else:
        for number, line in read_lines(file):
            if line.strip():
                try:
                    check_line(line, longest)
                    yield number, json_object(line)
                except Rejected as rejected:
                    yield number, rejected


def _csv_rows(file: Path, longest: int) -> Iterator[tuple[int, Row]]:
    """Yields (number of the row's last line, row by column name); missing values are None."""
    refuse_utf16(file)
    csv.field_size_limit(longest)
    with open_text(file, newline="") as text:
        rows = csv.reader(text, delimiter="\t" if file.suffix.lower() == ".tsv" else ",")
        try:
            header = [name.strip() for name in next(rows, [])]
        except csv.Error as error:
            raise UserError(f"{file}: the header is not valid CSV ({error}). Save it as CSV with UTF-8.") from error
        if not {*PROMPTS, *QUERIES["prompt"]} & set(header):
            raise UserError(
                f"{file}: the header must name the prompt's column ({', '.join(PROMPTS)}), separated by commas; it is"
                f" {shorten(str(header))}. Rename the column, or write a records.jsonl."
            )
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield rows.line_num, Rejected("not_csv", f"the row is not valid CSV ({error})", "Correct the row")
                continue
            if row:
                yield rows.line_num, _csv_row(header, row, longest)


def _csv_row(header: list[str], row: list[str], longest: int) -> Row:
    if len(row) > len(header):
        message = f"the row has {len(row)} fields, the header {len(header)}"
        return Rejected("not_csv", message, 'Put quotes (") around text with commas')
    if sum(map(len, row)) > longest:
        return too_long("the row", longest)
    fields = [None if text.strip().lower() in _NULLS else text for text in row]
    return dict(zip(header, fields + [None] * (len(header) - len(row)), strict=True))


def _rows_of(found: Any, name: str, folder: Path | None, guard: Guard, task: Task) -> Iterator[Item]:
    """The records of a `Dataset`; without a folder, one of the hub, whose files lie in the cache."""
    found = found.to_iterable_dataset() if hasattr(found, "to_iterable_dataset") else found
    rows: Iterable[Mapping[str, Any]] = found.decode(False)  # Images as bytes or path.
    with _said(name):
        for number, row in enumerate(rows, 1):
            place = Place(name, number)
            try:
                cells = {key: _cell(value, f"{place}, column {key}", guard, folder) for key, value in row.items()}
            except Rejected as rejected:
                yield rejected.at(place, None if row.get("id") is None else shorten(str(row["id"])))
            else:
                yield record_of(cells, place, folder or Path(name, "none"), task)


def _cell(value: Any, name: str, guard: Guard, folder: Path | None) -> Any:
    """Wraps an image's bytes; the struct of an image by path becomes the path."""
    if isinstance(value, list) and value and isinstance(value[0], dict | bytes):
        return [_cell(one, name, guard, folder) for one in value]
    if isinstance(value, dict) and value.keys() == {"bytes", "path"}:
        path = value["path"]
        value = (path if folder or path is None else Path(path)) if value["bytes"] is None else value["bytes"]
    if isinstance(value, bytes):
        guard.check_size(len(value), name)
        return EmbeddedImage(name, value)
    if isinstance(value, str):
        if len(value) > guard.max_record_bytes:
            raise too_long(f"the {name}", guard.max_record_bytes)
        check_utf8(value, f"the {name}")
    return value


def _streamed(file: Path) -> datasets.IterableDataset:
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # Ours is the one message.
    kind, options = ("parquet", {"batch_size": _BATCH}) if file.suffix.lower() == ".parquet" else ("arrow", {})
    with _said(file):
        files = glob.escape(str(file))
        return datasets.load_dataset(kind, data_files=files, split="train", streaming=True, **options)


def _opened(path: Path, split: str | None) -> datasets.Dataset:
    import datasets

    with _said(path):
        return _one_split(datasets.load_from_disk(str(path)), str(path), split)


def _one_split(found: Any, name: str, split: str | None) -> Any:
    """The split that is asked for, else ``train`` or the only one."""
    if not isinstance(found, dict):
        return found
    chosen = split or ("train" if "train" in found else next(iter(found)) if len(found) == 1 else None)
    if chosen not in found:
        raise UserError(f"{name} has the splits {', '.join(found)}: choose one with data.split.")
    return found[chosen]


@contextmanager
def _said(name: object) -> Iterator[None]:
    """Turns the library's error into one that names the file."""
    import pyarrow as pa

    import datasets

    try:
        yield
    except (pa.ArrowException, OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        text = str(error).strip().partition("\n")[0]
        raise UserError(f"{name} cannot be read ({text}). Download or write it again.") from error
