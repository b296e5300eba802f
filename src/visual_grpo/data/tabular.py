"""Rows of tables: JSON lines, JSON, CSV, Parquet, webdataset's tar, a `Dataset` on disk or on the Hugging Face hub.

The library `datasets` reads Parquet, saved and hub datasets.
"""

from __future__ import annotations

import glob
import json
import math
import os
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

from visual_grpo.common.errors import UserError
from visual_grpo.config import DataConfig
from visual_grpo.config.data import HUB
from visual_grpo.data.archives import tar_rows
from visual_grpo.data.columns import REJECTED, record_from_row
from visual_grpo.data.hub_dataset import load_hub_dataset
from visual_grpo.data.record import (
    LFS_REMEDY,
    EmbeddedImage,
    Item,
    Limits,
    Place,
    Record,
    Rejected,
    is_lfs_pointer,
    open_text,
    shorten,
)
from visual_grpo.data.splits import COLUMNS, chosen_splits, split_in_path, split_of_row, usual_name
from visual_grpo.data.text_tables import Row, csv_rows, has_json_lines, json_lines, json_rows

SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet", ".tar")
"""Suffixes of tables; a JSON file is a table if it holds records."""
LISTED = "metadata.jsonl"
"""The file of an image folder with a line of each picture: its name, its prompt, and more."""
_ROWS_IN_MEMORY = 16
"""Rows of a Parquet table that are read at a time."""


def find_records(path: Path, limits: Limits) -> Path | None:
    """Returns the file of JSON lines, or ``records.jsonl`` in the folder."""
    file = path / "records.jsonl" if path.is_dir() else path
    return file if file.suffix.lower() == ".jsonl" and file.is_file() and not is_metadata(file) else None


def read_records(path: Path, limits: Limits, data: DataConfig) -> Iterator[Item]:
    return _read_file(path, path.parent, limits, data, canonical=True)


def find_metadata(path: Path, limits: Limits) -> Path | None:
    """Returns a metadata file of the hub's image folders, or a folder with at least one below it."""
    files = map(path.joinpath, limits.walk(path)) if path.is_dir() else [path]
    return path if any(map(is_metadata, files)) else None


def read_metadata(path: Path, limits: Limits, data: DataConfig) -> Iterator[Item]:
    """Yields the rows of every ``metadata.jsonl`` and ``metadata.csv``; the name of a split folder becomes metadata.

    Where there are images, a row that names none is rejected.
    """
    base, names = (path.parent, [path.name]) if path.is_file() else (path, list(limits.walk(path)))
    has_images = any(map(limits.is_target, names))
    seen: set[Path] = set()
    for file in filter(is_metadata, map(base.joinpath, names)):
        limits.require_inside(file)
        if file.parent in seen:
            raise UserError(f"{file.parent}: has both metadata.jsonl and metadata.csv. Keep one of them.")
        seen.add(file.parent)
        folders = reversed(file.relative_to(base).parts[:-1])
        split = next(filter(usual_name, folders), None)
        for item in _read_file(file, base, limits, data):
            if has_images and isinstance(item, Record) and item.target_image is None and item.source_images is None:
                missing = Rejected("missing_target", "the row names no image", "Add its file_name, or remove the row")
                item = missing.at(item.place, item.id)
            elif split is not None and isinstance(item, Record):
                item = replace(item, extra={"split": split, **item.extra})
            yield item


def is_metadata(file: Path) -> bool:
    return file.name.lower() in (LISTED, "metadata.csv") and file.is_file()


def find_table(path: Path, limits: Limits) -> Path | None:
    """Returns a table, a folder with tables (also in its subfolder ``data``) or one written by ``save_to_disk``."""
    return path if is_saved(path) or _tables(path)[1] else None


def read_table(path: Path, limits: Limits, data: DataConfig) -> Iterator[Item]:
    if (datasets := _datasets(path, limits, data)) is not None:
        name, folder = (data.path.removeprefix(HUB), None) if data.path.startswith(HUB) else (path.name, path)
        for split in sorted(chosen_splits(datasets, data), key=str):
            for item in _read_dataset(datasets[split], name, folder, data):
                yield replace(item, split=split)
        return
    base, files = _tables(path)
    for file in files:
        if file != path:  # The path that the user names may be a link.
            limits.require_inside(file)
        yield from _read_file(file, base, limits, data)


def count_table(path: Path, limits: Limits, data: DataConfig) -> Counter[str | None] | None:
    """Returns the number of rows in each split, or None if it is not known without reading them."""
    if (datasets := _datasets(path, limits, data)) is not None:
        return Counter({split: int(dataset.num_rows) for split, dataset in datasets.items()})
    base, files = _tables(path)
    if any(file.suffix.lower() != ".parquet" for file in files):
        return None
    counts = Counter[str | None]()
    for file in files:
        if file != path:
            limits.require_inside(file)
        with _name_in_errors(file):
            named, table = split_in_path(file.relative_to(base).as_posix()), pq.ParquetFile(file)
            if columns := [name for name in table.schema_arrow.names if name.lower() in COLUMNS]:
                counts.update(split_of_row(row) or named for row in table.read(columns=columns).to_pylist())
            else:
                counts[named] += table.metadata.num_rows
    return counts


def is_saved(path: Path) -> bool:
    return any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _datasets(path: Path, limits: Limits, data: DataConfig) -> dict[str | None, Any] | None:
    """Loads a saved or hub dataset by its splits, None for one without; returns None for other tables."""
    is_hub = data.path.startswith(HUB)
    if not is_hub and not is_saved(path):
        return None
    import datasets

    with _name_in_errors(data.path):
        if is_hub:
            return load_hub_dataset(data)
        _require_own_files(path, limits)
        dataset = datasets.load_from_disk(str(path)).with_format(None)  # In one, a number may be a tensor.
        return dict(dataset) if isinstance(dataset, dict) else {None: dataset}


def _require_own_files(saved: Path, limits: Limits) -> None:
    """Raises UserError if a saved dataset names a file outside its folder, or a pipe, socket or device."""

    def own(file: Path) -> Path:
        limits.require_inside(file)
        if not file.is_file():
            raise UserError(f"{file} is not an ordinary file. Save the dataset again.")
        return file

    listed = saved / "dataset_dict.json"
    splits = json.loads(own(listed).read_bytes())["splits"] if listed.is_file() else [""]
    for folder in map(saved.joinpath, splits):
        own(folder / "dataset_info.json")
        for table in json.loads(own(folder / "state.json").read_bytes())["_data_files"]:
            own(folder / table["filename"])


def _tables(path: Path) -> tuple[Path, list[Path]]:
    """Returns the dataset's folder and its tables, also those in its subfolder ``data``."""
    base, files = path.parent, [path]
    if not path.is_file():
        base, files = path, [file for folder in (path, path / "data") for file in sorted(folder.glob("[!.]*"))]
        # Next to a tar, img2dataset writes a table of the same records, also of those that it could not fetch.
        files = [file for file in files if file.suffix == ".tar" or not file.with_suffix(".tar").is_file()]
    return base, [file for file in files if file.is_file() and _is_table(file)]


def _is_table(file: Path) -> bool:
    suffix = file.suffix.lower()
    if suffix != ".json":
        return suffix in SUFFIXES
    with open_text(file) as text:  # Other JSON files next to data are seldom lists.
        return text.read(100).lstrip().startswith("[") or has_json_lines(file)


def _read_file(file: Path, base: Path, limits: Limits, data: DataConfig, *, canonical: bool = False) -> Iterator[Item]:
    """Yields the records of one table in the dataset's folder ``base``."""
    name, suffix = file.relative_to(base).as_posix(), file.suffix.lower()
    if suffix == ".parquet":
        import datasets

        if "::" in str(file):  # The library would open what stands before it.
            raise UserError(f"{file} has :: in its name. Rename it.")
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # The UserError is the one message.
        with _name_in_errors(file):
            files = glob.escape(str(file))
            dataset = datasets.load_dataset(
                "parquet", data_files=files, split="train", streaming=True, batch_size=_ROWS_IN_MEMORY
            )
        yield from _read_dataset(dataset, name, file.parent, data)
        return
    readers: dict[str, Callable[[Path], Iterator[tuple[int, Row]]]] = {
        ".json": json_rows,
        ".jsonl": json_lines,
        ".tar": partial(_tar_rows, limits=limits),
    }
    if suffix == ".json" and has_json_lines(file):
        suffix = ".jsonl"
    for number, row in readers.get(suffix, partial(csv_rows, data=data))(file):
        place = Place(name, number)
        if isinstance(row, dict):
            yield record_from_row(row, place, file.parent, data, canonical=canonical)
        else:
            yield row.at(place)


def _tar_rows(file: Path, limits: Limits) -> Iterator[tuple[int, Row]]:
    with _name_in_errors(file):
        yield from tar_rows(file, limits)


def _read_dataset(dataset: Any, name: str, folder: Path | None, data: DataConfig) -> Iterator[Record | Rejected]:
    """Yields the records of a `Dataset`; without a folder, one of the hub, whose files lie in the cache."""
    rows = dataset.to_iterable_dataset() if hasattr(dataset, "to_iterable_dataset") else dataset
    labelled = {key: kind for key, kind in (rows.features or {}).items() if "ClassLabel" in str(kind)}
    with _name_in_errors(name):
        for number, row in enumerate(rows.decode(False), 1):  # Images as bytes or path.
            place = Place(name, number)
            row |= {key: _with_names(row[key], kind) for key, kind in labelled.items()}
            try:
                cells = {key: _cell(value, f"{place}, column {key}", name, folder) for key, value in row.items()}
            except Rejected as rejection:
                yield replace(rejection.at(place), columns=dict.fromkeys(row, REJECTED))
            else:
                yield record_from_row(cells, place, folder or Path(name, "none"), data)  # No local file belongs to it.


def _with_names(value: Any, kind: Any) -> Any:
    """Returns a value with names for the numbers of classes, also in lists and objects."""
    if hasattr(kind, "int2str"):
        return kind.int2str(value) if isinstance(value, int) and value >= 0 else value
    if isinstance(value, dict) and isinstance(kind, dict):
        return {key: _with_names(one, kind.get(key)) for key, one in value.items()}
    return [_with_names(one, kind.feature) for one in value] if isinstance(value, list) else value


def _cell(value: Any, name: str, dataset: str, folder: Path | None) -> Any:
    """Wraps an image's bytes; an image stored by its path becomes the path, and NaN None. Other values stay."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, list) and value and isinstance(value[0], dict | bytes):
        return [_cell(image, name, dataset, folder) for image in value]
    if isinstance(value, dict) and (value.keys() == {"bytes", "path"} or isinstance(value.get("bytes"), bytes)):
        path, value = value.get("path"), value["bytes"]
        if value is None and path is not None:
            value = path if folder is not None else _cached(path, dataset)
    return EmbeddedImage(name, value) if isinstance(value, bytes) else value


def _cached(path: str, dataset: str) -> Path:
    """Returns the path of a downloaded image. Raises Rejected if it is not one of the hub's ``dataset``."""
    import datasets

    repository = Path(HF_HUB_CACHE, "--".join(["datasets", *dataset.split("/")[:2]]))
    folders = (repository, Path(datasets.config.DOWNLOADED_DATASETS_PATH))
    real = Path(os.path.realpath(path))
    if not any(real.is_relative_to(folder.resolve()) for folder in folders):
        message = f"{shorten(path)!r} is not among the files that were downloaded for {dataset}"
        raise Rejected("outside_folder", message, "Store the image itself in the table, or remove the record")
    if not real.is_file():
        raise Rejected("missing_target", f"{shorten(path)!r} is not an ordinary file", "Download the dataset again")
    return real


@contextmanager
def _name_in_errors(name: object) -> Iterator[None]:
    """Turns the library's error into one that names the file."""
    import datasets

    unreadable = (pa.ArrowException, tarfile.TarError, datasets.exceptions.DatasetsError)
    try:
        yield
    except (*unreadable, OSError, ValueError, KeyError, TypeError, HTTPError) as error:
        if isinstance(name, Path) and name.is_file() and is_lfs_pointer(name):
            raise UserError(f"{name} is a Git LFS pointer, not the file. {LFS_REMEDY}.") from error
        text = str(error).strip().partition("\n")[0]
        raise UserError(f"{name} cannot be read ({text}). Download it again, or write it with other types.") from error
