"""The Parquet manifest of the prepared records, written in a stream and read lazily."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord
from visual_grpo.data.splits import prompt_key

IMAGES = "images"
"""Folder of the prepared images, next to the manifest."""
SEEN = "seen.json"
FEW_PROMPTS = 10
"""An interval over fewer independent prompts is not to be relied on."""


def prompt_hash(prompt: str) -> str:
    """Returns 64 bits as hex: among a million prompts, two share one with a probability of 3e-8."""
    return hashlib.blake2b(prompt_key(prompt).encode(), digest_size=8).hexdigest()


def seen_keys(row: Mapping[str, Any]) -> set[str]:
    """Returns hashes of what a training on the manifest's ``row`` has seen: its source images, or else its prompt.

    Instructions and queries do not count: few of them serve many images (`splits.split_group`).
    """
    return {image[:16] for image in row["source_sha256"] or ()} or {prompt_hash(row["prompt"])}


def write_seen(rows: Iterable[Mapping[str, Any]], folder: Path, earlier: frozenset[str] = frozenset()) -> None:
    """Keeps what a training on the manifest's ``rows``, and those ``earlier`` that it goes on from, have seen."""
    (folder / SEEN).write_text(json.dumps(sorted(earlier.union(*map(seen_keys, rows)))), encoding="utf-8")


def read_seen(folder: Path) -> frozenset[str]:
    """Returns the hashes of `write_seen`."""
    file = folder / SEEN
    try:
        return frozenset(map(str, json.loads(file.read_text(encoding="utf-8"))))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{file} is missing or damaged: expected a list of hashes. Train again.") from error


ROWS_PER_GROUP = 512
"""Rows per Parquet row group: the number held in memory by the writer, and by a reader that looks up single rows."""
_CACHED_GROUPS = 8
_REPORT_KEY = b"visual_grpo.data_report"
_DIGESTED = ("id", "prompt", "split", "metadata", "target_sha256", "source_sha256")


def schema() -> pa.Schema:
    """Returns the manifest's columns; paths are relative to its folder.

    ``split_group`` is the sha256 of the key that the records of a group share (`splits.split_group`); ``target_file``
    the target's path in the dataset; ``original_*`` are of the upright original of the target.
    """
    text, texts = pa.string(), pa.list_(pa.string())
    optional = {
        **dict.fromkeys(("split_group", "target_image", "target_file", "target_sha256", "metadata"), text),
        **dict.fromkeys(("source_images", "source_sha256"), texts),
        **dict.fromkeys(("original_width", "original_height"), pa.int32()),
    }
    required = [pa.field(name, text, nullable=False) for name in ("id", "prompt", "split")]
    return pa.schema([*required, *(pa.field(name, kind) for name, kind in optional.items())])


def write_manifest(
    path: Path, rows: Iterable[Mapping[str, Any]], report: Callable[[], Mapping[str, Any]] = dict
) -> None:
    """Writes rows of `schema` in groups, and what ``report`` returns after the last one into the file's metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remaining = iter(rows)
    with pq.ParquetWriter(path, schema(), compression="zstd") as writer:
        while group := [dict(row) for row in islice(remaining, ROWS_PER_GROUP)]:
            writer.write_table(pa.Table.from_pylist(group, schema=schema()))
        writer.add_key_value_metadata({_REPORT_KEY: json.dumps(report())})


class RecordTable(Sequence[PromptRecord]):
    """All records of a manifest or a subset; only recently used row groups are in memory.

    ``table[i]`` is a `PromptRecord` with absolute image paths, ``table[a:b]`` a `RecordTable`. ``rows`` are the row
    numbers in the manifest, int64 [n]; None = all.
    """

    def __init__(self, path: Path, rows: np.ndarray | None = None) -> None:
        self.path = Path(path).absolute()
        self._rows = np.arange(self._file.metadata.num_rows) if rows is None else rows

    def split(self, *names: str) -> RecordTable:
        splits = self._file.read(columns=["split"])["split"].to_numpy()
        return RecordTable(self.path, self._rows[np.isin(splits[self._rows], names)])

    @property
    def report(self) -> dict[str, Any]:
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
        """Excludes the open file: tables are sent to the other ranks."""
        return {"path": self.path, "_rows": self._rows}

    @cached_property
    def _file(self) -> pq.ParquetFile:
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
            split_group=row["split_group"],
        )
