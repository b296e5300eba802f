"""The prepared records, read lazily from the manifest."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from visual_grpo.records.manifest import REPORT_KEY
from visual_grpo.types import PromptRecord

if TYPE_CHECKING:
    import numpy as np
    import pyarrow.parquet as pq

_CACHED_GROUPS = 8
"""Number of decoded row groups in the LRU cache, for random access."""

_DIGESTED = ("id", "prompt", "split", "metadata", "target_sha256", "source_sha256")


class RecordTable(Sequence[PromptRecord]):
    """All records of a manifest or a subset; only recently used row groups are in memory.

    ``table[i]`` is a `PromptRecord` with absolute image paths, ``table[a:b]`` a `RecordTable`.

    Args:
        path: the manifest.
        rows: int64 [n] row numbers of the manifest; None = all rows.
    """

    def __init__(self, path: Path, rows: np.ndarray | None = None) -> None:
        import numpy as np

        self.path = Path(path).absolute()
        self._rows = np.arange(self._file.metadata.num_rows) if rows is None else rows

    def split(self, *names: str) -> RecordTable:
        """The records of one split or of several, of those in `split.SPLITS`."""
        import numpy as np

        members = np.isin(self._file.read(columns=["split"])["split"].to_numpy(), names)
        return RecordTable(self.path, self._rows[np.asarray(members)[self._rows]])

    def where(self, keep: Callable[[PromptRecord], bool]) -> RecordTable:
        """The records for which ``keep`` is true."""
        import numpy as np

        kept = np.fromiter((keep(record) for record in self), dtype=bool, count=len(self))
        return RecordTable(self.path, self._rows[kept])

    @property
    def report(self) -> dict[str, Any]:
        """The data report that was stored with the manifest; empty if there is none."""
        stored = (self._file.metadata.metadata or {}).get(REPORT_KEY)
        return {} if stored is None else dict(json.loads(stored))

    @cached_property
    def digest(self) -> str:
        """sha256 of ids, prompts, splits, metadata and image checksums, in the table's order."""
        digest = hashlib.sha256()
        for row in self.rows():
            content = [row[name] for name in _DIGESTED]
            digest.update(json.dumps(content, ensure_ascii=True).encode() + b"\n")
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> PromptRecord: ...
    @overload
    def __getitem__(self, index: slice) -> RecordTable: ...
    def __getitem__(self, index: int | slice) -> PromptRecord | RecordTable:
        if isinstance(index, slice):
            return RecordTable(self.path, self._rows[index])
        return self._record(self._row(int(self._rows[index])))

    def __iter__(self) -> Iterator[PromptRecord]:
        return map(self._record, self.rows())

    def __repr__(self) -> str:
        return f"RecordTable({str(self.path)!r}, {len(self)} records)"

    def __getstate__(self) -> dict[str, Any]:
        """Excludes the open file, so that a table can be pickled for another process."""
        return {"path": self.path, "_rows": self._rows}

    @cached_property
    def _file(self) -> pq.ParquetFile:
        import pyarrow.parquet as pq

        return pq.ParquetFile(self.path, memory_map=True)

    @cached_property
    def _starts(self) -> np.ndarray:
        """int64 [groups]: number of each row group's first row."""
        import numpy as np

        metadata = self._file.metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        return np.cumsum([0, *sizes])[:-1]

    @cached_property
    def _groups(self) -> OrderedDict[int, list[dict[str, Any]]]:
        """Decoded row groups, the most recently used last (an LRU cache)."""
        return OrderedDict()

    def rows(self) -> Iterator[dict[str, Any]]:
        """The manifest's rows as mappings, with paths relative to its folder; columns: `manifest.schema`."""
        return (self._row(int(row)) for row in self._rows)

    def _row(self, row: int) -> dict[str, Any]:
        import numpy as np

        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        if group not in self._groups:
            self._groups[group] = self._file.read_row_group(group).to_pylist()
        self._groups.move_to_end(group)
        while len(self._groups) > _CACHED_GROUPS:
            self._groups.popitem(last=False)
        return self._groups[group][row - int(self._starts[group])]

    def _record(self, row: dict[str, Any]) -> PromptRecord:
        folder = self.path.parent
        target = row["target_image"]
        return PromptRecord(
            id=row["id"],
            prompt=row["prompt"],
            split=row["split"],
            target_image=None if target is None else folder / target,
            target_file=row.get("target_file"),
            source_images=tuple(folder / source for source in row["source_images"] or ()),
            metadata=json.loads(row["metadata"] or "{}"),
            held_with=row.get("held_with"),  # Manifests of older versions lack the column.
        )
