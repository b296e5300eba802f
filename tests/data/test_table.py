"""The manifest, written in groups and read lazily."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from visual_grpo.data.table import ROWS_PER_GROUP, RecordTable, write_manifest

SPLITS = ("train", "eval", "train", "held_out")
COUNT = 3 * ROWS_PER_GROUP + 7


def row(number):
    return {"id": f"id {number}", "prompt": f"prompt {number}", "split": SPLITS[number % 4]}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("manifest") / "records.parquet"
    write_manifest(path, (row(number) for number in range(COUNT)), lambda: {"k": "猫"})
    return RecordTable(path)


def test_rows_come_back_in_order_by_number_and_by_iteration(table):
    expected = [f"id {number}" for number in range(COUNT)]
    assert len(table) == COUNT
    assert [record.id for record in table] == expected
    for number in (0, ROWS_PER_GROUP - 1, ROWS_PER_GROUP, COUNT - 1, -1):
        assert table[number].id == expected[number]
    with pytest.raises(IndexError):
        table[COUNT]


def test_splits_are_tables_in_the_same_order(table):
    train = table.split("train")
    assert [record.id for record in train] == [f"id {n}" for n in range(0, COUNT, 2)]
    assert train[-1].id == f"id {COUNT - 1}"
    assert len(table.split("none")) == 0
    assert [record.id for record in train[1:3].split("train")] == ["id 2", "id 4"]
    assert [record.id for record in table[3:10:3]] == ["id 3", "id 6", "id 9"]


def test_the_report_is_kept_with_the_rows(table, tmp_path):
    assert table.report == {"k": "猫"}
    write_manifest(tmp_path / "a.parquet", [row(0)])
    assert RecordTable(tmp_path / "a.parquet").report == {}


def test_the_digest_depends_on_the_content(table, tmp_path):
    def digest(rows, name="a"):
        write_manifest(tmp_path / f"{name}.parquet", rows)
        return RecordTable(tmp_path / f"{name}.parquet").digest

    reference = digest([row(0), row(1)])
    assert reference == digest([row(0), row(1)], "b")
    changes: list[dict[str, Any]] = [
        {"id": "x"},
        {"prompt": "x"},
        {"split": "x"},
        {"metadata": "{}"},
        {"target_sha256": "x"},
        {"source_sha256": ["x"]},
    ]
    others = [digest([row(0), {**row(1), **change}]) for change in changes]
    assert len({reference, *others}) == 7
    assert digest([row(1), row(0)]) != reference
    assert table[:2].digest == reference


def test_a_table_can_be_pickled(table):
    copied = pickle.loads(pickle.dumps(table.split("train")))
    assert [record.id for record in copied[:3]] == ["id 0", "id 2", "id 4"]


def test_an_error_while_writing_leaves_the_old_manifest(tmp_path):
    path = tmp_path / "records.parquet"
    write_manifest(path, [row(0)])

    def failing():
        yield row(1)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_manifest(path, failing())
    assert [record.id for record in RecordTable(path)] == ["id 0"]
    assert list(tmp_path.iterdir()) == [path]
