"""The manifest of prepared records: a Parquet file, written in a stream."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_PER_GROUP = 512
"""Rows per Parquet row group: the number held in memory by the writer, and by a reader that looks up single rows."""

REPORT_KEY = b"visual_grpo.data_report"
"""Key of the data report in the Parquet file's metadata."""


def schema() -> pa.Schema:
    """The columns; paths are relative to the manifest's folder, sha256 sums are 64 hex digits.

    ``held_with`` is the sha256 of the record's group key, see `split.held_out_by`.

    ``target_file`` is where the target came from, relative to the dataset; null if it was embedded in a table.

    ``width`` and ``height`` are those of the prepared images and null without any image; ``original_*`` are those of
    the upright original of the target and null without a target.
    """
    import pyarrow as pa

    text, texts = pa.string(), pa.list_(pa.string())
    return pa.schema(
        [
            pa.field("id", text, nullable=False),
            pa.field("prompt", text, nullable=False),
            pa.field("split", text, nullable=False),
            pa.field("held_with", text),
            pa.field("target_image", text),
            pa.field("target_file", text),
            pa.field("source_images", texts),
            pa.field("metadata", text),
            pa.field("width", pa.int32()),
            pa.field("height", pa.int32()),
            pa.field("original_width", pa.int32()),
            pa.field("original_height", pa.int32()),
            pa.field("target_sha256", text),
            pa.field("target_original_sha256", text),
            pa.field("source_sha256", texts),
            pa.field("source_original_sha256", texts),
        ]
    )


def write_manifest(
    path: Path,
    rows: Iterable[Mapping[str, Any]],
    report: Callable[[], Mapping[str, Any]] | None = None,
) -> None:
    """Writes rows in groups to a temporary file, which replaces ``path`` when it is complete.

    Args:
        rows: mappings with the columns of `schema`; nullable columns may be left out.
        report: called after the last row; its result is stored in the file's metadata.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with pq.ParquetWriter(fresh, schema(), compression="zstd") as writer:
            for group in _groups(rows):
                writer.write_table(pa.Table.from_pylist(group, schema=schema()))
            if report is not None:
                writer.add_key_value_metadata({REPORT_KEY: json.dumps(report())})
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def image_paths(path: Path) -> Iterator[str]:
    """The images that a manifest names, relative to its folder; one named by several records comes several times."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=ROWS_PER_GROUP, columns=["target_image", "source_images"]):
            for row in batch.to_pylist():
                yield from filter(None, [row["target_image"], *(row["source_images"] or ())])


def _groups(rows: Iterable[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    remaining = iter(rows)
    while group := [dict(row) for row in islice(remaining, ROWS_PER_GROUP)]:
        yield group
