"""The manifest, written in groups and read lazily."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from visual_grpo.common.errors import UserError
from visual_grpo.data.manifest import (
    ROWS_PER_GROUP,
    SEEN,
    RecordTable,
    prompt_hash,
    read_seen,
    seen_keys,
    write_manifest,
    write_seen,
)


def asked(prompt, *images):
    return {"prompt": prompt, "source_sha256": [*images] or None}


def test_prompts_are_known_again_however_they_are_spelt_and_edits_by_their_images(tmp_path):
    with pytest.raises(UserError):
        read_seen(tmp_path)
    write_seen([asked("a red circle")], tmp_path)
    write_seen([asked("一个红色的圆"), asked("the wheel", "0123456789abcdef" * 4)], tmp_path, read_seen(tmp_path))
    seen = read_seen(tmp_path)
    assert {prompt_hash("A  red Circle "), prompt_hash("一个红色的圆"), "0123456789abcdef"} == seen
    assert seen.isdisjoint(seen_keys(asked("the wheel", "f" * 64)))
    assert not seen.isdisjoint(seen_keys(asked("the car", "f" * 64, "0123456789abcdef" * 4)))
    assert "red" not in (tmp_path / SEEN).read_text(), "only hashes are kept"
    for text in ("[", "3"):
        (tmp_path / SEEN).write_text(text)
        with pytest.raises(UserError, match=rf"{SEEN} is missing or damaged"):
            read_seen(tmp_path)


CYCLE = ("train", "eval", "train", "held_out")
COUNT = 3 * ROWS_PER_GROUP + 7


def row(number):
    return {"id": f"id {number}", "prompt": f"prompt {number}", "split": CYCLE[number % 4]}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("manifest") / "records.parquet"
    write_manifest(path, (row(number) for number in range(COUNT)), lambda: {"k": "猫"})
    return RecordTable(path)


def test_rows_come_back_in_order_by_number_and_by_iteration(table, tmp_path):
    assert table.report == {"k": "猫"}
    write_manifest(tmp_path / "a.parquet", [row(0)])
    assert RecordTable(tmp_path / "a.parquet").report == {}
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
    copied = pickle.loads(pickle.dumps(train))
    assert [record.id for record in copied[:3]] == ["id 0", "id 2", "id 4"]


def test_the_digest_depends_on_the_content(table, tmp_path):
    def digest(rows, name="a"):
        write_manifest(tmp_path / f"{name}.parquet", rows)
        return RecordTable(tmp_path / f"{name}.parquet").digest

    reference = digest([row(0), row(1)])
    assert reference == digest([row(0), row(1)], "b")
    changes: dict[str, Any] = dict.fromkeys(("id", "prompt", "split", "target_sha256"), "x")
    changes |= {"metadata": "{}", "source_sha256": ["x"]}
    others = [digest([row(0), {**row(1), name: value}]) for name, value in changes.items()]
    assert len({reference, *others}) == 7
    assert digest([row(1), row(0)]) != reference
    assert table[:2].digest == reference
