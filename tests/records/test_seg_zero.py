"""Seg-Zero's Parquet tables."""

from __future__ import annotations

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.records.making import jsonl
from tests.records.test_queries import mask, prepare
from visual_grpo.errors import UserError
from visual_grpo.images import read_image, read_mask
from visual_grpo.records.layouts.detect import find_records
from visual_grpo.records.layouts.solution import solution_of
from visual_grpo.records.raw import EmbeddedImage, RawRecord, Rejected

TAGS = "<box>(12,8),(23,31)</box><points>(14,10),(20,30)</points>"
OBJECTS = [
    {"bbox_2d": [12, 8, 23, 31], "point_2d": [14, 10]},
    {"bbox_2d": [4, 40, 20, 63], "point_2d": [20, 60]},
]


def photo(size=(48, 64), colour="red"):
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def pixels(size, x1, y1, x2, y2):
    found = np.zeros(size[::-1], bool)
    found[y1 : y2 + 1, x1 : x2 + 1] = True
    return found.tolist()


def table(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return path


def items(path):
    return list(find_records(path, "seg_zero").items())


@pytest.mark.parametrize("where", ["", "data/"])
def test_both_forms_of_solution_with_masks_beside(tmp_path, where):
    """The mask of id 7 has the size before the image was stretched."""
    data = tmp_path / "data"
    row = {"problem": "the left wing", "image": photo(), "img_height": 64, "img_width": 48}
    table(data / f"{where}train.parquet", [{**row, "id": "a/b", "solution": TAGS}])
    seven = {**row, "id": "7", "solution": json.dumps(OBJECTS), "img_height": 128, "img_width": 36}
    table(data / f"{where}train-2.parquet", [{**seven, "problem": "两只翅膀"}])
    mask(data / "masks/a/b.png", (48, 64), (12, 8, 23, 31))
    mask(data / "masks/7.png", (36, 128), (3, 16, 17, 126))
    second, first = prepare(tmp_path)

    assert (first.id, first.prompt) == ("a/b", "the left wing")
    assert first.metadata["box"] == [24.5, 3.75, 46.5, 15.25]
    assert first.metadata["points"] == [[28.5, 4.75], [40.5, 14.75]]
    assert first.metadata["img_width"] == 48
    assert read_image(first.source_images[0]).getpixel((0, 0)) == (255, 0, 0)
    assert read_mask(first.target_image).sum() == 24 * 12

    assert second.prompt == "两只翅膀"
    assert second.metadata["box"] == [8.5, 3.75, 46.5, 31.25]
    assert second.metadata["points"] == [[28.5, 4.75], [40.5, 29.75]]


def test_masks_in_the_table_and_no_solution_or_id(tmp_path):
    row = {"image": photo(), "ann_id": 9, "mask": pixels((48, 64), 12, 8, 23, 31)}
    table(tmp_path / "data/test.parquet", [{**row, "text": f"part {number}"} for number in range(5)])
    first, *others = prepare(tmp_path)
    assert (len(others), first.prompt, first.metadata["ann_id"]) == (4, "part 0", 9)
    assert first.metadata["box"] == [24, 4, 47, 15]
    assert len({record.id for record in (first, *others)}) == 5
    table(tmp_path / "data/test.parquet", [{**row, "text": "part 4"}])
    assert [record.id for record in prepare(tmp_path)] == [others[-1].id]


def test_a_mask_as_an_image_or_as_numbers(tmp_path):
    small = {"image": photo((2, 1)), "problem": "a", "id": 1}
    white = table(tmp_path / "image.parquet", [{**small, "mask": photo((2, 1), "white")}])
    (record,) = items(white)
    assert isinstance(record, RawRecord)
    assert isinstance(record.target_image, EmbeddedImage)
    assert read_mask(record.target_image.open()).tolist() == [[True, True]]
    (record,) = items(table(tmp_path / "numbers.parquet", [{**small, "mask": [[0, 3]]}]))
    assert isinstance(record, RawRecord)
    assert isinstance(record.target_image, EmbeddedImage)
    assert read_mask(record.target_image.open()).tolist() == [[False, True]]


def test_images_by_path_lie_beside_the_table(tmp_path):
    row = {"problem": "a", "id": 1, "solution": TAGS}
    path = {"bytes": None, "path": "a.png"}
    (record,) = items(table(tmp_path / "data/train.parquet", [{**row, "image": path}]))
    assert isinstance(record, RawRecord)
    assert (record.source_images, record.folder) == ("a.png", tmp_path / "data")
    assert record.target_image == "masks/1.png"


def test_rows_that_cannot_be_used_are_reported_with_their_number(tmp_path):
    good = {"problem": "a", "image": photo(), "id": "good", "solution": TAGS, "mask": pixels((48, 64), 1, 1, 9, 9)}
    rows = [
        good,
        {**good, "id": "solution", "solution": "left"},
        {**good, "id": "corrupt", "image": {"bytes": b"nonsense", "path": None}},
        {**good, "id": "ragged", "mask": [[True], [True, False]]},
        {**good, "id": "lost", "mask": None},
        {**good, "id": "no image", "image": None},
        {**good, "id": "box", "solution": "<box>(12,8),(23,31),(1,1)</box>"},
        {**good, "id": "canvas", "solution": "<box>(12,8),(230,31)</box>"},
    ]
    table(tmp_path / "data/train.parquet", rows)
    listed = prepare(tmp_path).report["rejected"]["listed"]
    assert [(entry["id"], entry["line"], entry["reason"]) for entry in listed] == [
        ("solution", 2, "wrong_type"),
        ("corrupt", 3, "corrupt_image"),
        ("ragged", 4, "corrupt_image"),
        ("lost", 5, "missing_mask"),
        ("no image", 6, "missing_source"),
        ("box", 7, "wrong_type"),
        ("canvas", 8, "wrong_box"),
    ]
    assert "train.parquet, row 3, column image" in listed[1]["message"]


def test_only_tables_with_the_columns_are_recognised(tmp_path):
    row = {"image": photo(), "text": "a"}
    table(tmp_path / "captions.parquet", [row])
    with pytest.raises(UserError, match="seg_zero: "):
        find_records(tmp_path)
    table(tmp_path / "captions.parquet", [{**row, "solution": TAGS}] * 3)
    assert find_records(tmp_path).layout.name == "seg_zero"
    assert find_records(tmp_path / "captions.parquet").count() == 3
    jsonl(tmp_path / "records.jsonl", [{"prompt": "a"}])
    assert find_records(tmp_path).layout.name == "records"


def test_a_damaged_table_is_named(tmp_path):
    (tmp_path / "train.parquet").write_bytes(b"PAR1nonsense")
    with pytest.raises(UserError, match=r"train.parquet: cannot be read as Parquet"):
        find_records(tmp_path)


@pytest.mark.parametrize(
    ("text", "box", "points"),
    [
        (TAGS, [12, 8, 23, 31], [[14, 10], [20, 30]]),
        (" <box> (1.5, 2) , (3,4) </box>\n", [1.5, 2, 3, 4], None),
        ("<points>(1,2)</points>", None, [[1, 2]]),
        ("<box>(1,2),<points>( 1 , 2 )</points>", None, [[1, 2]]),
        ("<box>(9,9)</box><box>(1,2),(3,4)</box> </points>", [1, 2, 3, 4], None),
        (json.dumps(OBJECTS), [4, 8, 23, 63], [[14, 10], [20, 60]]),
        (json.dumps(OBJECTS[:1]), [12, 8, 23, 31], [[14, 10]]),
        (json.dumps(OBJECTS[0]), [12, 8, 23, 31], [[14, 10]]),
        ('[{"bbox_2d": [1, 2, 3, 4]}]', [1, 2, 3, 4], None),
        ("[]", None, None),
    ],
)
def test_solutions(text, box, points):
    assert solution_of(text) == (box, points)


@pytest.mark.parametrize(
    "text", ["<box>" * 200_000, f"<box>({' ' * 200_000}</box>", "(" * 500_000, "<points>" * 99_999]
)
def test_a_long_solution_takes_no_time(text):
    with pytest.raises(Rejected, match="solution must be "):
        solution_of(text)


@pytest.mark.parametrize(
    "text",
    ["left", "<box></box", "<box>12,8,23,31</box>", "<box>(1,2),(3,x)</box>", "[1]", "[{}]", "[", '[{"bbox_2d": 3}]'],
)
def test_invalid_solutions_are_rejected(text):
    with pytest.raises(Rejected, match=r"(solution|box) must be "):
        solution_of(text)
