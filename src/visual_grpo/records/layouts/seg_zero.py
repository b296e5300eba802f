"""The Parquet tables of Seg-Zero (arXiv 2503.06520) and VisionReasoner (arXiv 2505.12081) on the Hugging Face hub.

A folder with ``*.parquet`` files, directly or in its subfolder ``data``, with the columns

- ``image``: bytes, a path, or the hub's struct of both;
- ``problem`` or ``text``: the query;
- ``mask``: rows of pixels (bool, or numbers that are 0 outside) or an image like ``image``. If absent,
  ``masks/<id>.png`` next to the tables or, for tables in ``data``, next to that folder;
- ``solution``, optional if there is a column ``mask``:
  ``<box>(x1,y1),(x2,y2)</box><points>(x1,y1),(x2,y2)</points>``, or JSON
  ``[{"bbox_2d": [x1, y1, x2, y2], "point_2d": [x, y]}, ...]``; several objects give the box around all of them and
  all points. In pixels of the image as stored in the table (840 x 840 in Seg-Zero);
- ``id`` (optional), and ``img_height``, ``img_width``: the size of the image before the dataset's authors resized it;
  the mask may have that size too.

Other columns of text and numbers become metadata.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_grpo.errors import UserError
from visual_grpo.records.guard import ANYWHERE, Guard, too_large, too_many_pixels
from visual_grpo.records.layouts.solution import box_and_points
from visual_grpo.records.layouts.table_reader import read_rows
from visual_grpo.records.raw import EmbeddedImage, Item, Place, RawRecord, Rejected
from visual_grpo.records.text import too_long

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

LOOKS_FOR = "*.parquet (also in data) with image, problem or text, and solution or mask, as in Seg-Zero's datasets"

_QUERIES = ("problem", "text")
_KNOWN_COLUMNS = frozenset({"id", "image", "mask", "solution", *_QUERIES})
_MEMORY = 2
"""Bytes for decoding a table, for each that an image file may have."""


def find(path: Path, guard: Guard) -> Path | None:
    """A table, or a folder with at least one; None if the first table lacks the required columns."""
    file = next((file for file, _ in _tables(path, guard)), None)
    if file is None:
        return None
    with _opened(file) as table:
        columns = set(table.schema_arrow.names)
    fits = "image" in columns and columns & set(_QUERIES) and columns & {"solution", "mask"}
    return path if fits else None


def missing(path: Path, names: Sequence[str]) -> str:
    """Why `find` found nothing; ``names`` are of the files below the folder."""
    file = next((file for file, _ in _tables(path, ANYWHERE)), None)
    if file is None:
        return "there is no *.parquet, neither directly nor in data"
    with _opened(file) as table:
        return f"{file.name} has the columns {', '.join(table.schema_arrow.names)}"


def count(path: Path, guard: Guard) -> int:
    total = 0
    for file, _ in _tables(path, guard):
        with _opened(file) as table:
            total += table.metadata.num_rows
    return total


def read(path: Path, guard: Guard) -> Iterator[Item]:
    """Yields one item for each row of every table; memory holds four rows."""
    for file, name in _tables(path, guard):
        rows = read_rows(file, _columns(file), _MEMORY * guard.max_file_bytes)
        for number, row in enumerate(rows, 1):
            yield _item(row, file, Place(name, number), guard)


def _columns(file: Path) -> list[str]:
    """The columns that matter; of others those of text and numbers.

    Raises:
        UserError: two columns have one name.
    """
    import pyarrow as pa

    with _opened(file) as table:
        schema = table.schema_arrow
    twice = [name for name, times in Counter(schema.names).items() if times > 1]
    if twice:
        raise UserError(f"{file}: several columns are named {twice[0]!r}. Rename them.")
    unused = (pa.types.is_nested, pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    return [
        field.name for field in schema if field.name in _KNOWN_COLUMNS or not any(kind(field.type) for kind in unused)
    ]


def _tables(path: Path, guard: Guard) -> Iterator[tuple[Path, str]]:
    """Yields (file, its path relative to the data folder).

    Raises:
        UserError: a file that must not be opened.
    """
    if path.is_file() and path.suffix.lower() == ".parquet":
        yield path, path.name
    for folder in (path, path / "data"):
        if folder.is_dir():
            for file in sorted(folder.glob("[!.]*.parquet")):
                guard.require(file)
                yield file, file.relative_to(path).as_posix()


@contextmanager
def _opened(file: Path) -> Iterator[pq.ParquetFile]:
    """Opens a table for its footer; exceptions of the Parquet reader become a UserError that names the file.

    Raises:
        UserError: the file is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as table:
            yield table
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file}: cannot be read as Parquet ({error}). Download the file again.") from error


def _item(row: Mapping[str, pa.Scalar], file: Path, place: Place, guard: Guard) -> Item:
    """Converts a row; ``row`` maps columns to values."""
    record_id = None
    try:
        _check_sizes(row, guard)
        record_id = _value(row, "id")
        box, points = box_and_points(_value(row, "solution"))
        image = _image(_value(row, "image"), f"{place}, column image")
        mask = _mask(row, record_id, file, place, guard.max_pixels)
    except Rejected as rejected:
        return rejected.at(place, None if record_id is None else str(record_id))
    others = {key: _value(row, key) for key in row if key not in _KNOWN_COLUMNS}
    return RawRecord(
        place=place,
        folder=file.parent,
        id=record_id,
        prompt=next((query for key in _QUERIES if (query := _value(row, key)) is not None), None),
        source_images=image,
        target_image=mask,
        extra={
            **{key: value for key, value in others.items() if _is_plain(value)},
            **({} if box is None else {"box": box}),
            **({} if points is None else {"points": points}),
        },
    )


def _check_sizes(row: Mapping[str, pa.Scalar], guard: Guard) -> None:
    """Rejects a row with a cell that is too large, before it is converted."""
    import pyarrow as pa

    for name, value in row.items():
        is_struct = isinstance(value, pa.StructScalar) and value.is_valid
        cell = value["bytes"] if is_struct and "bytes" in value else value
        if not isinstance(cell, pa.BinaryScalar) or not cell.is_valid:
            continue
        is_image = not isinstance(cell, pa.StringScalar | pa.LargeStringScalar)
        size = cell.as_buffer().size
        if is_image and size > guard.max_file_bytes:
            raise too_large(f"the column {name}", size, guard.max_file_bytes)
        if not is_image and size > guard.max_record_bytes:
            raise too_long(f"the column {name}", guard.max_record_bytes)


def _value(row: Mapping[str, pa.Scalar], key: str) -> Any:
    return row[key].as_py() if key in row else None


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _image(value: Any, name: str) -> Any:
    """Wraps bytes as an `EmbeddedImage`; returns a path unchanged."""
    if isinstance(value, Mapping):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    return EmbeddedImage(name, value) if isinstance(value, bytes) else value


def _mask(row: Mapping[str, pa.Scalar], record_id: Any, file: Path, place: Place, most: int) -> Any:
    """``most``: pixels."""
    import pyarrow as pa

    mask, name = row.get("mask"), f"{place}, column mask"
    if mask is not None and mask.is_valid:
        is_list = pa.types.is_list(mask.type) or pa.types.is_large_list(mask.type)
        return EmbeddedImage(name, _png(_pixels(mask, most))) if is_list else _image(mask.as_py(), name)
    if record_id is None:
        return None
    beside = f"masks/{record_id}.png"
    outside = f"../{beside}"
    return outside if file.parent.name == "data" and (file.parent / outside).is_file() else beside


def _pixels(mask: pa.ListScalar, most: int) -> np.ndarray:
    """bool [height, width] from rows of pixels, without converting them to Python numbers.

    Raises:
        Rejected: rows of different lengths, or not rows of numbers; more than ``most`` pixels.
    """
    import pyarrow as pa

    rows = mask.values
    if not (pa.types.is_list(rows.type) or pa.types.is_large_list(rows.type)):
        raise Rejected("corrupt_image", f"mask must be rows of pixels, got {mask.type}", "Store it as an image")
    widths, pixels = rows.value_lengths().unique().to_pylist(), rows.flatten()
    if len(widths) != 1 or not widths[0] or pixels.null_count or not _is_number(pixels.type):
        raise Rejected(
            "corrupt_image",
            f"mask must be rows of equal length of bools or numbers, got {pixels.type} in rows of {widths[:5]}",
            "Correct the mask or store it as an image",
        )
    if len(pixels) > most:
        raise too_many_pixels("mask", widths[0], len(rows), most)
    return pixels.to_numpy(zero_copy_only=False).reshape(len(rows), widths[0]) != 0


def _is_number(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _png(pixels: np.ndarray) -> bytes:
    from PIL import Image

    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()
