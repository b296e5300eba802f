"""Rows of tables: JSON lines, JSON, CSV, Parquet, a `Dataset` on disk or on the Hugging Face hub.

The library `datasets` reads Parquet, saved and hub datasets. JSON lines and CSV are read here: its readers need
columns of one type and give up a whole file for one bad line, where only that record should be rejected.
"""

from __future__ import annotations

import csv
import glob
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from visual_grpo.common.errors import UserError
from visual_grpo.config import DataConfig, Task
from visual_grpo.data.queries import mask_image, parse_solution
from visual_grpo.data.record import (
    EmbeddedImage,
    Item,
    Limits,
    Note,
    Place,
    Record,
    Rejected,
    is_image_name,
    open_text,
    shorten,
)

PICTURES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt", "text", "caption", "instruction", "edit_prompt", "edit"),
    "source_images": ("source_image", "source", "source_img", "input_image", "original_image"),
    "target_image": ("target_image", "target", "target_img", "edited_image", "output_image", "file_name", "image"),
}
"""Field -> columns in datasets of pictures and edits, such as InstructPix2Pix's, MagicBrush's, the hub's image folders.
The first is the key of ``records.jsonl``."""
QUERIES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt", "query", "problem", "text", "caption"),
    "source_images": ("source_image", "image", "file_name"),
    "target_image": ("target_image", "mask"),
}
"""Field -> columns in queries about an image, as in Seg-Zero's datasets (arXiv 2503.06520)."""
HUB = "hf://datasets/"
SUFFIXES = (".parquet", ".csv", ".tsv", ".jsonl", ".json")
_SPLIT_FOLDERS = frozenset({"train", "validation", "valid", "val", "dev", "eval", "test"})
_NULLS = frozenset({"", "nan", "null", "none", "n/a", "<na>"})
"""Spellings of missing values in spreadsheets and pandas, in lower case."""
_BATCH = 16
"""Rows of a Parquet table in memory."""

Row = dict[str, Any] | Rejected


def find_records(path: Path, limits: Limits) -> Path | None:
    """Returns the file of JSON lines, or ``records.jsonl`` in the folder."""
    file = path / "records.jsonl" if path.is_dir() else path
    return file if file.suffix.lower() == ".jsonl" and not is_metadata(file.name) and file.is_file() else None


def read_records(path: Path, limits: Limits, data: DataConfig) -> Iterator[Item]:
    return _read_file(path, path.name, data, canonical=True)


def find_metadata(path: Path, limits: Limits) -> Path | None:
    """Returns a metadata file of the hub's image folders, or a folder with at least one below it."""
    if path.is_dir():
        return path if next(_metadata_files(path, limits), None) else None
    return path if path.is_file() and is_metadata(path.name) else None


def read_metadata(path: Path, limits: Limits, data: DataConfig) -> Iterator[Item]:
    """Yields the rows of every ``metadata.jsonl`` and ``metadata.csv``; the name of a split folder becomes metadata."""
    if path.is_file():
        yield from _read_file(path, path.name, data)
        return
    splits: dict[Path, str | None] = {}
    """The name of a split in the path of each folder."""
    for name in _metadata_files(path, limits):
        file = path / name
        limits.require_inside(file)
        if file.parent in splits:
            raise UserError(f"{file.parent}: has both metadata.jsonl and metadata.csv. Keep one of them.")
        splits[file.parent] = next((part for part in Path(name).parts[:-1] if part.lower() in _SPLIT_FOLDERS), None)
        yield from _read_file(file, name, data, split=splits[file.parent])
    if names := sorted({split for split in splits.values() if split is not None}):
        yield Note(
            f"the split folders {', '.join(names)} are only stored as metadata['split'];"
            " data.eval_share and data.held_out_share determine the splits"
        )


def _metadata_files(path: Path, limits: Limits) -> Iterator[str]:
    return (name for name in limits.walk(path) if is_metadata(name) and (path / name).is_file())


def is_metadata(name: str) -> bool:
    return name.rpartition("/")[2].lower() in ("metadata.jsonl", "metadata.csv")


def find_table(path: Path, limits: Limits) -> Path | None:
    """Returns a table, a folder with tables (also in its subfolder ``data``) or one written by ``save_to_disk``."""
    if path.is_dir():
        return path if _is_saved(path) or _tables(path) else None
    return path if path.is_file() and path.suffix.lower() in SUFFIXES else None


def read_table(path: Path, limits: Limits, data: DataConfig) -> Iterator[Item]:
    if data.path.startswith(HUB):
        yield from _read_dataset(_load(path, data), data.path.removeprefix(HUB), None, data.task)
    elif _is_saved(path):
        yield from _read_dataset(_load(path, data), path.name, path, data.task)
    elif path.is_file():
        yield from _read_file(path, path.name, data)
    else:
        for file in _tables(path):
            limits.require_inside(file)
            yield from _read_file(file, file.relative_to(path).as_posix(), data)


def count_table(path: Path, data: DataConfig) -> int | None:
    """Returns the number of rows, or None if it is not known without reading them."""
    if data.path.startswith(HUB) or _is_saved(path):
        return int(_load(path, data).num_rows)
    files = [path] if path.is_file() else _tables(path)
    if any(file.suffix.lower() != ".parquet" for file in files):
        return None
    with _name_in_errors(path):
        return sum(pq.read_metadata(file).num_rows for file in files)


def _is_saved(path: Path) -> bool:
    return any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _load(path: Path, data: DataConfig) -> Any:
    """Loads the configured split, else ``train`` or the only one; hub datasets go into the library's cache once."""
    import datasets

    with _name_in_errors(data.path):
        if data.path.startswith(HUB):
            name = data.path.removeprefix(HUB)
            dataset = datasets.load_dataset(name, split=data.split, revision=data.revision)
        else:
            dataset = datasets.load_from_disk(str(path))
    if not isinstance(dataset, dict):
        return dataset
    split = data.split or ("train" if "train" in dataset or len(dataset) > 1 else next(iter(dataset)))
    if split not in dataset:
        raise UserError(f"{data.path} has the splits {', '.join(dataset)}: choose one with data.split.")
    return dataset[split]


def _tables(path: Path) -> list[Path]:
    files = [file for folder in (path, path / "data") for file in sorted(folder.glob("[!.]*")) if file.is_file()]
    return [file for file in files if file.suffix.lower() in SUFFIXES and (file.suffix != ".json" or _is_list(file))]


def _is_list(file: Path) -> bool:
    """Other JSON files beside data are seldom lists."""
    with open_text(file) as text:
        return text.read(100).lstrip().startswith("[")


def _read_file(
    file: Path, name: str, data: DataConfig, *, canonical: bool = False, split: str | None = None
) -> Iterator[Item]:
    """Yields the records of one table; ``name`` is its path in the dataset, ``split`` that of rows without one."""
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        import datasets

        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # The UserError is the one message.
        options = {"data_files": glob.escape(str(file)), "streaming": True, "batch_size": _BATCH}
        with _name_in_errors(file):
            dataset = datasets.load_dataset("parquet", split="train", **options)
        yield from _read_dataset(dataset, name, file.parent, data.task)
        return
    rows = {".csv": _csv_rows, ".tsv": _csv_rows, ".json": _json_rows}.get(suffix, _json_lines)(file)
    for number, row in rows:
        place = Place(name, number)
        if isinstance(row, Rejected):
            yield row.at(place)
        else:
            row = row if split is None else {"split": split, **row}
            yield record_from_row(row, place, file.parent, data.task, canonical=canonical)


def _json_rows(file: Path) -> Iterator[tuple[int, Row]]:
    try:
        with open_text(file) as text:
            rows = json.load(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not valid JSON ({error}). Correct it.") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{file}: expected a list of objects, one a record. Use records.jsonl instead.")
    yield from enumerate(rows, 1)


def _json_lines(file: Path) -> Iterator[tuple[int, Row]]:
    remedy = 'Write one JSON object on each line, such as {"prompt": "a red circle"}'
    with open_text(file) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                # NaN and Infinity, which other languages write, are no JSON.
                value = json.loads(line, parse_constant=lambda _: None)
            except (ValueError, RecursionError) as error:
                yield number, Rejected("not_json", f"the line is not valid JSON ({error})", remedy)
                continue
            message = f"the line is a JSON {type(value).__name__}, not an object"
            yield number, value if isinstance(value, dict) else Rejected("not_json", message, remedy)


def _csv_rows(file: Path) -> Iterator[tuple[int, Row]]:
    """Yields (number of the row's last line, row by column name); missing values are None."""
    with open_text(file, newline="") as text:
        rows = csv.DictReader(text, delimiter="\t" if file.suffix.lower() == ".tsv" else ",", restkey="")
        try:
            rows.fieldnames = header = [name.strip() for name in rows.fieldnames or ()]
            if not {*PICTURES["prompt"], *QUERIES["prompt"]} & {*header}:
                names = ", ".join(PICTURES["prompt"])
                raise UserError(
                    f"{file}: the header must name the prompt's column ({names}), separated by commas; it is"
                    f" {shorten(str(header))}. Rename the column, or write a records.jsonl."
                )
            for row in rows:
                if isinstance(row.get(""), list):
                    message = f"the row has more fields than the header, {len(header)}"
                    yield rows.line_num, Rejected("not_csv", message, 'Put quotes (") around text with commas')
                else:
                    missing = {name for name, value in row.items() if value is None or value.strip().lower() in _NULLS}
                    yield rows.line_num, row | dict.fromkeys(missing)
        except csv.Error as error:
            raise UserError(f"{file}, line {rows.line_num}, is not valid CSV ({error}). Correct the row.") from error


def _read_dataset(dataset: Any, name: str, folder: Path | None, task: Task) -> Iterator[Item]:
    """Yields the records of a `Dataset`; without a folder, one of the hub, whose files lie in the cache."""
    rows = dataset.to_iterable_dataset() if hasattr(dataset, "to_iterable_dataset") else dataset
    with _name_in_errors(name):
        for number, row in enumerate(rows.decode(False), 1):  # Images as bytes or path.
            place = Place(name, number)
            cells = {key: _cell(value, f"{place}, column {key}", folder) for key, value in row.items()}
            yield record_from_row(cells, place, folder or Path(name, "none"), task)


def _cell(value: Any, name: str, folder: Path | None) -> Any:
    """Wraps an image's bytes; an image stored by its path becomes the path. Other values stay."""
    if isinstance(value, list) and value and isinstance(value[0], dict | bytes):
        return [_cell(image, name, folder) for image in value]
    if isinstance(value, dict) and value.keys() == {"bytes", "path"}:
        path = value["path"]
        value = (path if folder or path is None else Path(path)) if value["bytes"] is None else value["bytes"]
    return EmbeddedImage(name, value) if isinstance(value, bytes) else value


def record_from_row(row: Mapping[str, Any], place: Place, folder: Path, task: Task, *, canonical: bool = False) -> Item:
    """Returns the record of a row, or its rejection.

    Args:
        folder: base of the row's relative paths.
        canonical: a row of records.jsonl: with a ``prompt``, only the first names of `PICTURES` are fields.
    """
    extra = dict(row)
    record_id, group = extra.pop("id", None), extra.pop("group", None)
    names = QUERIES if task == "segmentation" else _picture_columns(row, task, canonical)
    fields = {field: _take(extra, columns) for field, columns in names.items()}
    if task == "segmentation":
        try:
            fields["target_image"] = _take_prompts_of_mask(extra, fields["target_image"], record_id, folder)
        except Rejected as rejected:
            return rejected.at(place, record_id)
    if canonical or isinstance(extra.get("metadata"), Mapping):
        fields["metadata"] = extra.pop("metadata", None)
    if not canonical:
        extra = {key: value for key, value in extra.items() if key in ("box", "points") or _is_plain(value)}
    return Record(place=place, folder=folder, id=record_id, group=group, **fields, extra=extra)


def _picture_columns(row: Mapping[str, Any], task: Task, canonical: bool) -> dict[str, list[str]]:
    """Returns the columns that may hold each field of a picture or an edit."""
    if canonical and "prompt" in row and (task != "i2i" or "source_image" in row):
        return {field: [columns[0]] for field, columns in PICTURES.items()}
    names = {
        # A column "source" may also say where a picture comes from.
        field: [name for name in columns if name in (columns[0], "file_name") or _is_image(row.get(name))]
        for field, columns in PICTURES.items()
    }
    # The hub's image folders have their captions in "text", and may have another column "prompt".
    return names | {"prompt": [*(["text"] if "file_name" in row else []), *PICTURES["prompt"]]}


def _take(extra: dict[str, Any], names: tuple[str, ...] | list[str]) -> Any:
    """Removes the first column with a value from ``extra`` and returns it; if none has a value, the first column."""
    present = sorted((name for name in names if name in extra), key=lambda name: extra[name] is None)
    return extra.pop(present[0]) if present else None


def _take_prompts_of_mask(extra: dict[str, Any], mask: Any, record_id: Any, folder: Path) -> Any:
    """Returns the mask; leaves ``box`` and ``points`` in ``extra``, where the row has them."""
    box = _take(extra, ("box", "bbox"))
    solution_box, solution_points = parse_solution(extra.pop("solution", None))
    if isinstance(mask, list):
        mask = mask_image(mask, "the mask")
    if mask is None and solution_box is not None and record_id is not None:
        # Seg-Zero's masks lie next to the tables or, for tables in ``data``, next to that folder.
        parent = "../" if folder.name == "data" and (folder / "../masks").is_dir() else ""
        mask = f"{parent}masks/{record_id}.png"
    box = solution_box if box is None else box
    points = extra.get("points", solution_points)
    extra |= {name: value for name, value in (("box", box), ("points", points)) if value is not None}
    return mask


def _is_image(value: Any) -> bool:
    if isinstance(value, list) and value:
        return all(map(_is_image, value))
    return isinstance(value, EmbeddedImage | Path) or (isinstance(value, str) and is_image_name(value))


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


@contextmanager
def _name_in_errors(name: object) -> Iterator[None]:
    """Turns the library's error into one that names the file."""
    import datasets

    try:
        yield
    except (pa.ArrowException, OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        text = str(error).strip().partition("\n")[0]
        raise UserError(f"{name} cannot be read ({text}). Download or write it again.") from error
