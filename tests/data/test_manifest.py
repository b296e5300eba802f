"""Splits of records, and the manifest, written in groups and read lazily."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.data.making import data_config
from visual_grpo.common.errors import UserError
from visual_grpo.data.manifest import (
    ROWS_PER_GROUP,
    SEEN,
    RecordTable,
    prompt_hash,
    read_seen,
    write_manifest,
    write_seen,
)
from visual_grpo.data.record import Place, Record
from visual_grpo.data.splits import SPLITS, assign_split, split_group


def shares(eval_share, held_out, sealed=0.0):
    return data_config("x", eval_share=eval_share, held_out_share=held_out, sealed_share=sealed)


def split_of(number, data):
    record = Record(place=Place("a"), folder=Path(), id=number, prompt=f"prompt {number.split()[-1]}")
    return assign_split(split_group(record, (), data.task), record.id, data)


def test_shares_are_met():
    data = shares(0.1, 0.25, 0.2)
    splits = [split_of(f"id {number}", data) for number in range(4000)]
    for name, share in (("sealed", 0.2), ("held_out", 0.25), ("eval", 0.1)):
        assert splits.count(name) / 4000 == pytest.approx(share, abs=0.02)
    assert Counter(splits).total() == sum(Counter(splits)[name] for name in SPLITS)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((0.3, 0.4), ["held_out", "held_out", "eval", "train", "eval", "train"]),
        ((0.1, 0.4, 0.2), ["held_out", "held_out", "train", "train", "sealed", "sealed"]),
    ],
)
def test_these_splits_never_change(sizes, expected):
    """A new version must not move records of earlier runs from train to held_out."""
    assert [split_of(str(number), shares(*sizes)) for number in range(6)] == expected


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (("a red  circle ",), (" A RED\ncircle",), True),
        (("ａ red circle",), ("a red circle",), True),
        (("a red circle",), ("a blue circle",), False),
        (("make it red", None, ["1"]), (" Make  it RED", None, ["1"]), True),
        (("make it red", None, ["1"]), ("make it red", None, ["2"]), False),
        (("make it red", None, ["1", "2"]), ("make it red", None, ["2", "1"]), False),
        (("a", "g", ["1"]), ("b", "G ", ["2"]), True),
        (("a", "g"), ("a", "h"), False),
        (("a", "a"), ("a",), False),
        (("a", None, ["1"], "segmentation"), ("a", None, ["2"], "segmentation"), False),
        (("a", None, ["1"], "segmentation"), ("b", None, ["1"], "segmentation"), True),
    ],
)
def test_a_group_is_the_given_one_or_prompt_and_sources(one, other, same):
    def group(prompt, given=None, sources=(), task="t2i"):
        return split_group(Record(place=Place("a"), folder=Path(), prompt=prompt, group=given), sources, task)

    assert (group(*one) == group(*other)) is same


def test_seen_prompts_are_known_again_however_they_are_spelt(tmp_path):
    with pytest.raises(UserError):
        read_seen(tmp_path)
    write_seen(["a red circle"], tmp_path)
    write_seen(["一个红色的圆"], tmp_path, read_seen(tmp_path))
    seen = read_seen(tmp_path)
    assert {prompt_hash("A  red Circle "), prompt_hash("一个红色的圆")} == seen
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
