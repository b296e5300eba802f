"""Ids of records without one."""

from __future__ import annotations

from pathlib import Path

from visual_grpo.records.ids import with_ids
from visual_grpo.records.raw import Note, Place, RawRecord


def raw(prompt, line=1, file="records.jsonl", **fields):
    return RawRecord(place=Place(file, line), folder=Path(), prompt=prompt, **fields)


def ids(*records):
    return [record.id for record in with_ids(records) if isinstance(record, RawRecord)]


def test_an_id_depends_on_the_records_content_not_its_place():
    cat, dog = ids(raw("a cat", 1), raw("a dog", 2))
    assert cat != dog
    assert ids(raw("a fish", 1), raw(" a dog\n", 2), raw("a cat", 9)) == [*ids(raw("a fish")), dog, cat]


def test_prompt_images_and_folder_count():
    records = [
        raw("a cat"),
        raw("a cat", target_image="a.png"),
        raw("a cat", source_images=["a.png"]),
        raw("a cat", target_image="a.png", file="train/metadata.csv"),
    ]
    assert len(set(ids(*records))) == 4
    assert ids(*records[::-1]) == ids(*records)[::-1]


def test_equal_records_get_different_ids():
    first, second, third = ids(raw("a cat"), raw("a cat"), raw("a cat"))
    assert len({first, second, third}) == 3
    assert ids(raw("a cat")) == [first]


def test_given_ids_and_other_items_stay():
    items = [raw("a cat", id=7), Note("x")]
    assert list(with_ids(items)) == items


def test_invalid_records_get_ids_too():
    number, surrogate = ids(raw(3), raw("\udcff"))
    assert number != surrogate
