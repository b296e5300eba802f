"""The prepared records: their splits, and the Parquet manifest, written in a stream and read lazily.

Splits depend on hashes of the record alone, so that adding records never moves another.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import DataConfig
from visual_grpo.data.record import Record

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

SEEN = "seen_prompts.json"
SEALED = "sealed"
"""The split that only promotions open: nothing else draws, scores or shows its records."""
OPEN = ("train", "eval", "held_out")
SPLITS = (*OPEN, SEALED)
FEW_PROMPTS = 10
"""An interval over fewer independent prompts is not to be relied on."""


def assign_split(record: Record, source_sha256: Sequence[str], data: DataConfig) -> tuple[str, str]:
    """Returns the split and the group key of a checked record; ``source_sha256`` are of its original source images."""
    # Queries about one image are held out together, whatever they ask.
    key = group_key(None if data.task == "segmentation" else record.prompt, record.group, source_sha256)
    # Held-out keys are at one end of the range and sealed ones at the other, so that neither share takes from the other
    # when it is raised.
    fraction = _fraction("prompt", key)
    if fraction < data.held_out_share:
        return "held_out", key
    if fraction >= 1 - data.sealed_share:
        return SEALED, key
    # eval_share is a share of all records, but only those neither held out nor sealed can get into eval.
    rest = 1 - data.held_out_share - data.sealed_share
    return "eval" if data.eval_share > 0 and _fraction("id", record.id) < data.eval_share / rest else "train", key


def group_key(prompt: str | None, group: str | None = None, source_sha256: Sequence[str] = ()) -> str:
    """Returns the key of a record's group, which is held out, or sealed, together or not at all.

    It is ``group`` if given, else the prompt (None for queries) and the source images' content: holding out every "make
    it red" would hold out a skill.
    """
    if group is not None:
        return f"group\0{prompt_key(group)}"
    return "\0".join(["" if prompt is None else prompt_key(prompt), *source_sha256])


def prompt_key(prompt: str) -> str:
    """Normalises a prompt: letter case, white space and Unicode compatibility forms (NFKC) do not matter."""
    return " ".join(unicodedata.normalize("NFKC", prompt).casefold().split())


def _fraction(kind: str, text: str) -> float:
    """Returns a number in [0, 1), uniform over texts: the first 53 bits of a sha256 hash."""
    digest = hashlib.sha256(f"{kind}\0{text}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


def prompt_hash(prompt: str) -> str:
    """Returns 64 bits as hex: among a million prompts, two share one with a probability of 3e-8."""
    return hashlib.blake2b(prompt_key(prompt).encode(), digest_size=8).hexdigest()


def write_seen(prompts: Iterable[str], folder: Path, earlier: Set[str] = frozenset()) -> None:
    """Keeps hashes of the prompts that a training has seen beside its adapters, with those it started from."""
    (folder / SEEN).write_text(json.dumps(sorted({*map(prompt_hash, prompts)} | earlier)), encoding="utf-8")


def read_seen(folder: Path) -> frozenset[str]:
    file = folder / SEEN
    try:
        return frozenset(map(str, json.loads(file.read_text(encoding="utf-8"))))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{file} is missing or damaged: expected a list of hashes. Train again.") from error


ROWS_PER_GROUP = 512
"""In memory of the writer, and of a reader that looks up single rows."""
_CACHED_GROUPS = 8
_REPORT_KEY = b"visual_grpo.data_report"
_DIGESTED = ("id", "prompt", "split", "metadata", "target_sha256", "source_sha256")


def schema() -> pa.Schema:
    """Returns the manifest's columns; paths are relative to its folder.

    ``held_with`` is the sha256 of the record's `group_key`; ``target_file`` the target's path in the dataset;
    ``original_*`` are of the upright original of the target.
    """
    import pyarrow as pa

    text, texts = pa.string(), pa.list_(pa.string())
    optional = {
        **dict.fromkeys(("held_with", "target_image", "target_file", "target_sha256", "metadata"), text),
        **dict.fromkeys(("source_images", "source_sha256"), texts),
        **dict.fromkeys(("original_width", "original_height"), pa.int32()),
    }
    required = [pa.field(name, text, nullable=False) for name in ("id", "prompt", "split")]
    return pa.schema([*required, *(pa.field(name, kind) for name, kind in optional.items())])


def write_manifest(
    path: Path, rows: Iterable[Mapping[str, Any]], report: Callable[[], Mapping[str, Any]] = dict
) -> None:
    """Writes rows of `schema` in groups, and what ``report`` returns after the last one into the file's metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    remaining = iter(rows)
    with pq.ParquetWriter(path, schema(), compression="zstd") as writer:
        while group := [dict(row) for row in islice(remaining, ROWS_PER_GROUP)]:
            writer.write_table(pa.Table.from_pylist(group, schema=schema()))
        writer.add_key_value_metadata({_REPORT_KEY: json.dumps(report())})


class RecordTable(Sequence[PromptRecord]):
    """All records of a manifest or, with ``rows`` [n], some; only recently used row groups are in memory.

    ``table[i]`` is a `PromptRecord` with absolute image paths, ``table[a:b]`` a `RecordTable`.
    """

    def __init__(self, path: Path, rows: np.ndarray | None = None) -> None:
        self.path = Path(path).absolute()
        self._rows = np.arange(self._file.metadata.num_rows) if rows is None else rows

    def split(self, *names: str) -> RecordTable:
        splits = self._file.read(columns=["split"])["split"].to_numpy()
        return RecordTable(self.path, self._rows[np.isin(splits[self._rows], names)])

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
        """Excludes the open file: tables are sent to the other ranks."""
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
            split_group=row["held_with"],
        )
