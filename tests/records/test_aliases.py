"""Alternative key names of segmentation records."""

from __future__ import annotations

from pathlib import Path

import pytest

from visual_grpo.records.aliases import with_query_names
from visual_grpo.records.raw import EmbeddedImage, Note, Place, RawRecord, Rejection


def raw(extra, **fields):
    return RawRecord(place=Place("records.jsonl", 3), folder=Path(), extra=extra, **fields)


def renamed(extra, **fields):
    (item,) = with_query_names([raw(extra, **fields)])
    return item


@pytest.mark.parametrize("query", ["query", "problem"])
@pytest.mark.parametrize("box", ["box", "bbox"])
def test_alternative_names_are_accepted(query, box):
    extra = {query: "the left wing", "image": "a.png", "mask": "m.png", box: [1, 2, 3, 4], "points": [[1, 2]], "k": 1}
    record = renamed(extra)
    assert (record.prompt, record.source_images, record.target_image) == ("the left wing", "a.png", "m.png")
    assert record.extra == {"box": [1, 2, 3, 4], "points": [[1, 2]], "k": 1}


def test_the_standard_keys_need_no_alternative_names():
    record = renamed({"image": None}, prompt="a", source_images=["a.png"], target_image="m.png")
    assert (record.prompt, record.source_images, record.target_image, record.extra) == ("a", ["a.png"], "m.png", {})


@pytest.mark.parametrize(
    ("extra", "fields", "names"),
    [
        ({"query": "b"}, {"prompt": "a"}, "prompt and query"),
        ({"query": "b", "problem": "a"}, {}, "query and problem"),
        ({"image": "b.png"}, {"source_images": "a.png"}, "source_image and image"),
        ({"mask": "b.png"}, {"target_image": "a.png"}, "target_image and mask"),
        ({"box": [0, 0, 1, 1], "bbox": [0, 0, 1, 2]}, {}, "box and bbox"),
    ],
)
def test_two_names_with_different_values_are_rejected(extra, fields, names):
    rejection = renamed(extra, id="x", **fields)
    assert isinstance(rejection, Rejection)
    assert (rejection.reason, rejection.id, rejection.place.line) == ("ambiguous_key", "x", 3)
    assert rejection.message == f"{names} are both given, and differ"


def test_two_names_with_equal_values_are_accepted():
    record = renamed({"query": "a", "problem": "a", "box": [1], "bbox": [1]}, prompt="a")
    assert (record.prompt, record.extra) == ("a", {"box": [1]})


def test_rejections_and_notes_pass_unchanged():
    items = [Note("x"), raw({}, prompt="a")]
    assert list(with_query_names(items)) == items


def test_an_embedded_image_is_known_by_its_content_alone():
    assert str([EmbeddedImage("row 1", b"x")]) == str([EmbeddedImage("row 2", b"x")]) != str([EmbeddedImage("", b"y")])
