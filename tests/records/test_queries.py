"""From a folder of segmentation records to the manifest."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from tests.records.making import jsonl, picture
from visual_grpo.config import DataConfig
from visual_grpo.errors import UserError
from visual_grpo.images import read_image, read_mask, read_size
from visual_grpo.records.preparation import Preparation
from visual_grpo.records.table import RecordTable


def prepare(folder, **changes):
    """Prepares ``folder/data`` at height 32, width 96 into ``folder/out``, without eval and held-out splits."""
    shares = {"eval_share": 0, "held_out_share": 0}
    config = {"path": str(folder / "data"), "task": "segmentation", "height": 32, "width": 96, **shares, **changes}
    Preparation(DataConfig.model_validate(config)).write(folder / "out/records.parquet")
    return RecordTable(folder / "out/records.parquet")


def mask(path, size, *rectangles):
    """Writes white rectangles (inclusive corners) on black."""
    values = np.zeros(size[::-1], np.uint8)
    for x1, y1, x2, y2 in rectangles:
        values[y1 : y2 + 1, x1 : x2 + 1] = 255
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)
    return path


def one(folder, size=(48, 64), rectangle=(12, 8, 23, 31), **row):
    """A photo of ``size`` with a rectangle to find."""
    picture(folder / "data/a.png", size)
    mask(folder / "data/m.png", size, rectangle)
    return {"id": "x", "image": "a.png", "query": "the part", "mask": "m.png", **row}


def rejected(folder, *rows):
    """The listed rejections of the rows, prepared together with one valid record."""
    jsonl(folder / "data/records.jsonl", [*rows, one(folder, id="good")])
    return prepare(folder).report["rejected"]["listed"]


def test_image_and_mask_are_stretched_and_the_coordinates_with_them(tmp_path):
    """48 x 64 to 96 x 32: twice as wide, half as high."""
    row = one(tmp_path, query="左边的翅膀", bbox=[12, 8, 23, 31], points=[[0, 0], [20, 10]], style="ink")
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
        "points": [[0.5, -0.25], [40.5, 4.75]],
        "style": "ink",
    }


def test_box_and_points_are_derived_from_the_mask(tmp_path):
    jsonl(tmp_path / "data/records.jsonl", [one(tmp_path, box=None)])
    (record,) = prepare(tmp_path)
    assert record.metadata["box"] == [24, 4, 47, 15]
    found = read_mask(record.target_image)
    first, second = record.metadata["points"]
    assert first != second
    assert all(found[int(y), int(x)] for x, y in (first, second))


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


def test_a_mask_of_the_size_before_the_image_was_stretched(tmp_path):
    row = one(tmp_path, img_width=90, img_height=50)
    mask(tmp_path / "data/m.png", (90, 50), (45, 25, 89, 49))
    jsonl(tmp_path / "data/records.jsonl", [row])
    (record,) = prepare(tmp_path)
    assert record.metadata["box"] == [48, 16, 95, 31]


def test_rejections_name_the_key(tmp_path):
    rows = {
        "no image": one(tmp_path, image=None),
        "two images": one(tmp_path, image=["a.png", "a.png"]),
        "no mask": one(tmp_path, mask=None),
        "lost image": one(tmp_path, image="b.png"),
        "lost mask": one(tmp_path, mask="b.png"),
        "no query": one(tmp_path, query=None),
        "two names": one(tmp_path, problem="another"),
        "no box": one(tmp_path, box=[1, 2, 3]),
        "box outside": one(tmp_path, box=[1, 2, 49, 5]),
        "bbox the wrong way round": one(tmp_path, bbox=[5, 2, 4, 5]),
        "point outside": one(tmp_path, points=[[48, 5]]),
        "no point": one(tmp_path, points=[5, 5]),
        "box in the metadata": one(tmp_path, metadata={"box": [1, 2, 3, 4]}),
        "damaged": one(tmp_path, mask="damaged.png"),
        "empty": one(tmp_path, mask="empty.png"),
        "too small": one(tmp_path, mask="speck.png"),
    }
    (tmp_path / "data/damaged.png").write_bytes(b"nonsense")
    mask(tmp_path / "data/empty.png", (48, 64))
    mask(tmp_path / "data/speck.png", (48, 64), (5, 6, 5, 6))
    listed = rejected(tmp_path, *({**row, "id": name} for name, row in rows.items()))
    assert [(entry["id"], entry["reason"]) for entry in listed] == [
        ("no image", "missing_source"),
        ("two images", "several_sources"),
        ("no mask", "missing_mask"),
        ("lost image", "missing_source"),
        ("lost mask", "missing_mask"),
        ("no query", "empty_prompt"),
        ("two names", "ambiguous_key"),
        ("no box", "wrong_type"),
        ("box outside", "wrong_box"),
        ("bbox the wrong way round", "wrong_box"),
        ("point outside", "wrong_points"),
        ("no point", "wrong_type"),
        ("box in the metadata", "ambiguous_key"),
        ("damaged", "corrupt_image"),
        ("empty", "empty_mask"),
        ("too small", "empty_mask"),
    ]
    messages = {entry["id"]: entry["message"] for entry in listed}
    assert messages["lost image"].startswith("image 'b.png' does not exist")
    assert messages["lost mask"].startswith("mask 'b.png' does not exist")
    assert messages["no query"].startswith("there is no query")
    assert messages["empty"].startswith("the mask is empty: ")
    assert messages["too small"].startswith("the mask is empty at 96x32 pixels")
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


def test_a_second_run_reuses_both_images_with_the_same_result(tmp_path):
    jsonl(tmp_path / "data/records.jsonl", [one(tmp_path)])
    first = prepare(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out/images").iterdir()}
    second = prepare(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out/images").iterdir()} == before
    assert len(before) == 2
    assert second.digest == first.digest


def test_a_key_that_looks_misspelt_is_named(tmp_path):
    jsonl(tmp_path / "data/records.jsonl", [one(tmp_path, pionts=[[1, 2]])])
    with pytest.raises(UserError, match=r"there is no field 'pionts'\. Did you mean 'points'\?"):
        prepare(tmp_path)


@pytest.mark.parametrize(("task", "source"), [("t2i", {}), ("mixed", {}), ("i2i", {"source_image": "a.png"})])
def test_for_other_tasks_these_names_stay_metadata(tmp_path, task, source):
    """``image`` names the image only for segmentation."""
    extra = {"image": "nowhere.png", "query": "q", "mask": 5, "bbox": "wide", "points": []}
    picture(tmp_path / "data/a.png")
    jsonl(tmp_path / "data/records.jsonl", [{"id": "x", "prompt": "a cat", **source, **extra}])
    (record,) = prepare(tmp_path, task=task)
    assert record.prompt == "a cat"
    assert record.metadata == extra
    assert record.target_image is None
