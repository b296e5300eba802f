"""Rows of Parquet tables, decoded by another process."""

from __future__ import annotations

import os
import signal
import subprocess

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from visual_grpo.errors import UserError
from visual_grpo.records.layouts.table_reader import read_rows

MEMORY = 100_000_000


def table(path, rows, **options):
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def test_rows_are_those_that_the_library_reads_itself(tmp_path):
    rows = [
        {"a": f"x{n}", "b": {"bytes": bytes([n]), "path": None}, "c": [[n, 1]], "d.e": n / 2, "f": n} for n in range(11)
    ]
    rows[3]["a"] = None
    file = table(tmp_path / "a.parquet", rows, row_group_size=5)
    found = list(read_rows(file, ["a", "b", "c", "d.e"], MEMORY))
    assert [{name: value.as_py() for name, value in row.items()} for row in found] == [
        {name: value for name, value in row.items() if name != "f"} for row in rows
    ]


def test_columns_of_repeated_text_keep_their_values(tmp_path):
    texts = pa.array([f"t{n % 3}" for n in range(50)]).dictionary_encode()
    pq.write_table(pa.table({"a": texts}), tmp_path / "a.parquet", row_group_size=7)
    assert [row["a"].as_py() for row in read_rows(tmp_path / "a.parquet", ["a"], MEMORY)] == [
        f"t{n % 3}" for n in range(50)
    ]


def test_a_table_without_rows(tmp_path):
    pq.write_table(pa.table({"a": pa.array([], pa.string())}), tmp_path / "a.parquet")
    assert list(read_rows(tmp_path / "a.parquet", ["a"], MEMORY)) == []


def test_damage_in_the_middle_is_named_with_the_last_good_row(tmp_path):
    file = table(
        tmp_path / "a.parquet", [{"a": f"{n}" * 50} for n in range(400)], row_group_size=100, compression="gzip"
    )
    data = bytearray(file.read_bytes())
    chunk = pq.ParquetFile(file).metadata.row_group(2).column(0)
    at = chunk.dictionary_page_offset
    data[at : at + 40] = b"\xff" * 40
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"a\.parquet, after row 200: cannot be read as Parquet \(.+\)\. Download"):
        list(read_rows(file, ["a"], MEMORY))


def test_a_decoder_that_crashes_does_not_take_the_run_with_it(tmp_path, monkeypatch):
    file = table(tmp_path / "a.parquet", [{"a": "x" * 100_000} for _ in range(100)])
    started = []

    class Dying(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Dying)
    rows = read_rows(file, ["a"], MEMORY)
    next(rows)
    os.kill(started[0].pid, signal.SIGSEGV)
    with pytest.raises(UserError, match="decoding it ended by SIGSEGV"):
        list(rows)


def test_a_reader_that_has_had_enough_leaves_no_process(tmp_path):
    file = table(tmp_path / "a.parquet", [{"a": "x" * 100_000} for _ in range(100)])
    rows = read_rows(file, ["a"], MEMORY)
    next(rows)
    assert "table_decoder.py" in children()
    rows.close()  # type: ignore[attr-defined]
    assert "table_decoder.py" not in children()


def children():
    """Command lines of this process's children."""
    command = ["ps", "-ww", "--ppid", str(os.getpid()), "-o", "args"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
