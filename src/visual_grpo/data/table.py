"""The prepared records: a Parquet manifest, written in a stream and read lazily."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from visual_grpo.common.types import PromptRecord

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

ROWS_PER_GROUP = 512
"""Rows per Parquet row group: the number held in memory by the writer, and by a reader that looks up single rows."""
_CACHED_GROUPS = 8
_REPORT_KEY = b"visual_grpo.data_report"
_DIGESTED = ("id", "prompt", "split", "metadata", "target_sha256", "source_sha256")


def schema() -> pa.Schema:
    """The columns; paths are relative to the manifest's folder.

    ``held_with`` is the sha256 of the record's group key (`split.held_out_by`); ``target_file`` where the target came
    from, relative to the dataset; ``width`` and ``height`` those of the prepared images; ``original_*`` those of the
    upright original of the target.
    """
    import pyarrow as pa

    text, texts, number = pa.string(), pa.list_(pa.string()), pa.int32()
    optional = {
        **dict.fromkeys(("held_with", "target_image", "target_file"), text),
        "source_images": texts,
        "metadata": text,
        **dict.fromkeys(("width", "height", "original_width", "original_height"), number),
        **dict.fromkeys(("target_sha256", "target_original_sha256"), text),
        **dict.fromkeys(("source_sha256", "source_original_sha256"), texts),
    }
    required = [pa.field(name, text, nullable=False) for name in ("id", "prompt", "split")]
    return pa.schema([*required, *(pa.field(name, kind) for name, kind in optional.items())])


def write_manifest(
    path: Path, rows: Iterable[Mapping[str, Any]], report: Callable[[], Mapping[str, Any]] = dict
) -> None:
    """Writes rows of `schema` in groups to a temporary file, which replaces ``path`` when it is complete.

    Args:
        report: called after the last row; its result is stored in the file's metadata.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    remaining = iter(rows)
    try:
        with pq.ParquetWriter(fresh, schema(), compression="zstd") as writer:
            while group := [dict(row) for row in islice(remaining, ROWS_PER_GROUP)]:
                writer.write_table(pa.Table.from_pylist(group, schema=schema()))
            writer.add_key_value_metadata({_REPORT_KEY: json.dumps(report())})
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


class RecordTable(Sequence[PromptRecord]):
    """All records of a manifest or a subset; only recently used row groups are in memory.

    ``table[i]`` is a `PromptRecord` with absolute image paths, ``table[a:b]`` a `RecordTable`.

    Args:
        rows: int64 [n] row numbers of the manifest; None = all rows.
    """

    def __init__(self, path: Path, rows: np.ndarray | None = None) -> None:
        self.path = Path(path).absolute()
        self._rows = np.arange(self._file.metadata.num_rows) if rows is None else rows

    def split(self, *names: str) -> RecordTable:
        members = np.isin(self._file.read(columns=["split"])["split"].to_numpy(), names)
        return RecordTable(self.path, self._rows[members[self._rows]])

    @property
    def report(self) -> dict[str, Any]:
        """The data report that was stored with the manifest."""
        return dict(json.loads((self._file.metadata.metadata or {}).get(_REPORT_KEY, "{}")))

    @cached_property
    def digest(self) -> str:
        """sha256 of ids, prompts, splits, metadata and image checksums, in the table's order."""
        digest = hashlib.sha256()
        for row in self.rows():
            digest.update(json.dumps([row[name] for name in _DIGESTED], ensure_ascii=True).encode() + b"\n")
        return digest.hexdigest()

    def rows(self) -> Iterator[dict[str, Any]]:
        """The manifest's rows as mappings, with paths relative to its folder; columns: `schema`."""
        return map(self._row, self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> PromptRecord: ...
    @overload
    def __getitem__(self, index: slice) -> RecordTable: ...
    def __getitem__(self, index: int | slice) -> PromptRecord | RecordTable:
        if isinstance(index, slice):
            return RecordTable(self.path, self._rows[index])
        return self._record(self._row(self._rows[index]))

    def __iter__(self) -> Iterator[PromptRecord]:
        return map(self._record, self.rows())

    def __getstate__(self) -> dict[str, Any]:
        """Excludes the open file, so that a table can be copied and pickled."""
        return {"path": self.path, "_rows": self._rows}

    @cached_property
    def _file(self) -> pq.ParquetFile:
        import pyarrow.parquet as pq

        return pq.ParquetFile(self.path, memory_map=True)

    @cached_property
    def _group(self) -> Callable[[int], list[dict[str, Any]]]:
        file = self._file
        return lru_cache(_CACHED_GROUPS)(lambda group: file.read_row_group(group).to_pylist())

    def _row(self, row: int) -> dict[str, Any]:
        # All groups but the last have the size of the first.
        group, place = divmod(int(row), self._file.metadata.row_group(0).num_rows)
        return self._group(group)[place]

    def _record(self, row: dict[str, Any]) -> PromptRecord:
        folder, target = self.path.parent, row["target_image"]
        return PromptRecord(
            id=row["id"],
            prompt=row["prompt"],
            split=row["split"],
            target_image=None if target is None else folder / target,
            target_file=row["target_file"],
            source_images=tuple(folder / source for source in row["source_images"] or ()),
            metadata=json.loads(row["metadata"] or "{}"),
            held_with=row["held_with"],
        )
