"""Images and masks of queries in the manifest, and their coordinates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data import making
from tests.data.making import embedded, jsonl, mask, parquet, picture
from visual_grpo.common.images import read_image, read_size
from visual_grpo.common.masks import read_mask
from visual_grpo.data.image_store import rescale
from visual_grpo.data.record import Rejected


def prepare(folder, **changes):
    return making.prepare(folder, **{"task": "segmentation", "width": 96, **changes})


def one(folder, size=(48, 64), rectangle=(12, 8, 23, 31), **row):
    """A photo of ``size`` with a rectangle to find."""
    picture(folder / "data/a.png", size)
    mask(folder / "data/m.png", size, rectangle)
    return {"id": "x", "image": "a.png", "query": "the part", "mask": "m.png", **row}


def test_image_and_mask_are_stretched_and_the_coordinates_with_them(tmp_path):
    """48 x 64 to 96 x 32: twice as wide, half as high."""
    row = one(tmp_path, query="左边的翅膀", bbox=[12, 8, 23, 31], points=[[12, 8], [20, 10]], style="ink")
    corners = Image.new("RGB", (48, 64), "red")
    corners.paste("blue", (0, 0, 16, 24))
    corners.save(tmp_path / "data/a.png")
    jsonl(tmp_path / "data/records.jsonl", [row])
    (record,) = prepare(tmp_path)

    assert record.prompt == "左边的翅膀"
    (image,) = record.source_images
    assert read_size(image) == read_size(record.target_image) == (96, 32)
    assert read_image(image).getpixel((2, 1)) == (0, 0, 255)  # at the edge, which a crop would have removed
    expected = torch.zeros(32, 96, dtype=torch.bool)
    expected[4:16, 24:48] = True
    assert torch.equal(read_mask(record.target_image), expected)
    with Image.open(record.target_image) as stored:
        assert (stored.mode, set(np.unique(np.asarray(stored)))) == ("L", {0, 255})
    assert record.metadata == {
        "box": [24.5, 3.75, 46.5, 15.25],
        "points": [[24.5, 3.75], [40.5, 4.75]],
        "style": "ink",
    }


def test_box_and_points_are_derived_from_the_mask(tmp_path):
    jsonl(tmp_path / "data/records.jsonl", [one(tmp_path, box=None)])
    (record,) = prepare(tmp_path)
    assert record.metadata["box"] == [24, 4, 47, 15]
    pixels = read_mask(record.target_image)
    first, second = record.metadata["points"]
    assert first != second
    assert all(pixels[int(y), int(x)] for x, y in (first, second))


def test_the_mask_fits_the_upright_photo(tmp_path):
    photo = Image.new("RGB", (64, 48), "red")
    exif = photo.getexif()
    exif[0x0112] = 6
    (tmp_path / "data").mkdir()
    photo.save(tmp_path / "data/a.jpg", exif=exif)
    mask(tmp_path / "data/upright.png", (48, 64), (0, 60, 47, 63))
    mask(tmp_path / "data/lying.png", (64, 48), (0, 0, 9, 9))
    row = {"image": "a.jpg", "query": "the foot", "box": [0, 60, 48, 64]}
    names = [{**row, "id": name, "mask": f"{name}.png"} for name in ("upright", "lying")]
    jsonl(tmp_path / "data/records.jsonl", names)
    table = prepare(tmp_path)
    assert [record.id for record in table] == ["upright"]
    assert table[0].metadata["box"] == [0.5, 29.75, 94.5, 31.25]
    assert read_mask(table[0].target_image).nonzero()[:, 0].unique().tolist() == [30, 31]
    (entry,) = table.report["rejected"]["listed"]
    assert (entry["id"], entry["reason"]) == ("lying", "wrong_mask_size")
    assert entry["message"] == "the mask is 64x48 pixels, the upright image 48x64"


def test_rejections_name_the_key(tmp_path):
    changes: dict[str, tuple[dict[str, object], str]] = {
        "lost image": ({"image": "b.png"}, "missing_source"),
        "lost mask": ({"mask": "b.png"}, "missing_mask"),
        "no query": ({"query": None}, "empty_prompt"),
        "bbox the wrong way round": ({"bbox": [5, 2, 4, 5]}, "wrong_box"),
        "point outside": ({"points": [[48, 5]]}, "wrong_points"),
        "box in the metadata": ({"metadata": {"box": [1, 2, 3, 4]}}, "ambiguous_key"),
        "damaged": ({"mask": "damaged.png"}, "corrupt_image"),
        "empty": ({"mask": "empty.png"}, "empty_mask"),
        "too small": ({"mask": "speck.png"}, "empty_mask"),
    }
    rows = [{**one(tmp_path), **change, "id": name} for name, (change, _) in changes.items()]
    (tmp_path / "data/damaged.png").write_bytes(b"nonsense")
    mask(tmp_path / "data/empty.png", (48, 64))
    mask(tmp_path / "data/speck.png", (48, 64), (5, 6, 5, 6))
    jsonl(tmp_path / "data/records.jsonl", [*rows, one(tmp_path, id="good")])
    listed = prepare(tmp_path).report["rejected"]["listed"]
    assert {entry["id"]: entry["reason"] for entry in listed} == {name: why for name, (_, why) in changes.items()}
    messages = {entry["id"]: entry["message"] for entry in listed}
    assert messages["lost image"].startswith("image 'b.png' does not exist")
    assert messages["lost mask"].startswith("mask 'b.png' does not exist")
    assert messages["no query"].startswith("there is no query")
    assert messages["empty"] == messages["too small"] == "the mask is empty at 96x32 pixels"
    assert all(entry["remedy"] for entry in listed)


def test_records_of_one_image_are_held_out_together(tmp_path):
    rows: list[dict[str, object]] = []
    for number in range(24):
        picture(tmp_path / f"data/{number}.png", (48, 64), (number, 0, 0))
        picture(tmp_path / f"data/copy{number}.png", (48, 64), (number, 0, 0))
        names = (f"{number}.png", f"copy{number}.png")
        rows += [{"image": name, "query": f"part {k}", "mask": "m.png"} for k, name in enumerate(names)]
    mask(tmp_path / "data/m.png", (48, 64), (12, 8, 23, 31))
    jsonl(tmp_path / "data/records.jsonl", rows)
    splits = [record.split for record in prepare(tmp_path, held_out_share=0.5)]
    assert splits[::2] == splits[1::2]
    assert set(splits) == {"train", "held_out"}

    jsonl(tmp_path / "data/records.jsonl", [{**row, "group": "all"} for row in rows])
    assert len({record.split for record in prepare(tmp_path, held_out_share=0.1)}) == 1


@pytest.mark.parametrize(("task", "source"), [("t2i", {}), ("i2i", {"source_image": "a.png"})])
def test_for_other_tasks_these_names_stay_metadata(tmp_path, task, source):
    """``image`` names the image only for segmentation."""
    extra = {"image": "nowhere.png", "query": "q", "mask": 5, "bbox": "wide", "points": []}
    picture(tmp_path / "data/a.png")
    jsonl(tmp_path / "data/records.jsonl", [{"id": "x", "prompt": "a cat", **source, **extra}])
    (record,) = prepare(tmp_path, task=task)
    assert record.prompt == "a cat"
    assert record.metadata == extra
    assert record.target_image is None


class TestSegZero:
    """Tables of Seg-Zero and VisionReasoner on the hub."""

    @pytest.mark.parametrize("where", ["", "data/"])
    def test_both_forms_of_solution_with_masks_beside(self, tmp_path, where):
        """The mask of id 7 has the size before the image was stretched."""
        tags = "<box>(12,8),(23,31)</box><points>(14,10),(20,30)</points>"
        objects = (
            '[{"bbox_2d": [12, 8, 23, 31], "point_2d": [14, 10]}, {"bbox_2d": [4, 40, 20, 63], "point_2d": [20, 60]}]'
        )
        row = {"problem": "the left wing", "image": embedded(), "img_height": 64, "img_width": 48}
        parquet(tmp_path / f"data/{where}a.parquet", [{**row, "id": "a/b", "solution": tags}])
        seven = {**row, "id": "7", "solution": objects, "img_height": 128, "img_width": 36, "points": None}
        parquet(tmp_path / f"data/{where}b.parquet", [{**seven, "problem": "两只翅膀"}])
        mask(tmp_path / "data/masks/a/b.png", (48, 64), (12, 8, 23, 31))
        mask(tmp_path / "data/masks/7.png", (36, 128), (3, 16, 17, 126))
        first, second = prepare(tmp_path)
        assert (first.id, first.prompt, first.metadata["img_width"]) == ("a/b", "the left wing", 48)
        assert first.metadata["box"] == [24.5, 3.75, 46.5, 15.25]
        assert first.metadata["points"] == [[28.5, 4.75], [40.5, 14.75]]
        assert read_image(first.source_images[0]).getpixel((0, 0)) == (255, 0, 0)
        assert read_mask(first.target_image).sum() == 24 * 12
        assert second.prompt == "两只翅膀"
        assert second.metadata["box"] == [8.5, 3.75, 46.5, 31.25]
        assert second.metadata["points"] == [[28.5, 4.75], [40.5, 29.75]]

    def test_masks_in_the_table(self, tmp_path):
        pixels = np.zeros((64, 48), bool)
        pixels[8:32, 12:24] = True
        row = {"image": embedded(), "ann_id": 9, "mask": pixels.astype(int).tolist()}
        parquet(tmp_path / "data/test.parquet", [{**row, "text": f"part {number}"} for number in range(5)])
        first, *others = prepare(tmp_path)
        assert (len(others), first.prompt, first.metadata["ann_id"]) == (4, "part 0", 9)
        assert first.metadata["box"] == [24, 4, 47, 15]
        assert len({record.id for record in (first, *others)}) == 5

    def test_rows_that_cannot_be_used_are_reported_with_their_number(self, tmp_path):
        good = {"problem": "a", "image": embedded(), "id": "good", "solution": None, "mask": [[0] * 48, [1] * 48] * 32}
        rows = [
            good,
            {**good, "id": "solution", "solution": "left"},
            {**good, "id": "corrupt", "image": {"bytes": b"nonsense", "path": None}},
            {**good, "id": "ragged", "mask": [[1], [1, 0]]},
            {**good, "id": "lost", "mask": None},
            {**good, "id": "no image", "image": None},
            {**good, "id": "canvas", "solution": "<box>(12,8),(230,31)</box>"},
        ]
        parquet(tmp_path / "data/train.parquet", rows)
        listed = prepare(tmp_path).report["rejected"]["listed"]
        assert [(entry["id"], entry["line"], entry["reason"]) for entry in listed] == [
            ("solution", 2, "wrong_type"),
            ("corrupt", 3, "corrupt_image"),
            ("ragged", 4, "corrupt_image"),
            ("lost", 5, "missing_mask"),
            ("no image", 6, "missing_source"),
            ("canvas", 7, "wrong_box"),
        ]
        assert "train.parquet, row 3, column image" in listed[1]["message"]


class TestCoordinates:
    def test_pixel_centres_stay_where_they_are_on_the_picture(self):
        """80 x 40 to 160 x 20: the first pixel's centre is .5 from the edge, so 1 wide pixel in: .5 * 2 - .5."""
        to = {"size": (80, 40), "to": (160, 20)}
        points = rescale("points", ((0, 0), (79, 39), (39.5, 19.5)), **to)
        assert points == [(0.5, -0.25), (158.5, 19.25), (79.5, 9.5)]
        assert rescale("box", ((10, 4), (19, 7)), **to) == [(20.5, 1.75), (38.5, 3.25)]
        assert rescale("box", ((0, 1), (7, 9)), (8, 10), (8, 10)) == [(0, 1), (7, 9)]
        assert rescale("box", ((0, 0), (8, 10)), (8, 10), (8, 10)) == [(0, 0), (7, 9)], "a box may end at the width"

    @pytest.mark.parametrize(
        ("key", "outside"),
        [
            ("points", ((-1, 0), (0, -1), (8, 0), (0, 10))),
            ("box", ((-1, 0), (0, -1), (8.5, 3), (3, 10.5), (9, 0))),
        ],
    )
    def test_values_outside_and_others_are_rejected(self, key, outside):
        for point in outside:
            with pytest.raises(Rejected, match=rf"{key}: .* lies outside the image of 8x10 pixels"):
                rescale(key, [(1, 1), point], (8, 10), (16, 16))
