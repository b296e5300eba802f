"""COCO annotations: masks as pycocotools draws them, the images they are about, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pycocotools import mask as coco_mask

from tests.data.making import data_config, picture
from tests.data.making import prepare as prepare_records
from visual_grpo.common.errors import UserError
from visual_grpo.common.images import read_image
from visual_grpo.common.masks import read_mask
from visual_grpo.data.coco import _decoded
from visual_grpo.data.record import Note, Record, Rejected
from visual_grpo.data.sources import find_records

WIDTH, HEIGHT = 160, 96
POLYGON = [[10, 20, 50, 20, 50, 45, 10, 45]]
"""A rectangle of 40 x 25 pixels: coordinates are of the pixels' corners."""


def pixels():
    mask = np.zeros((HEIGHT, WIDTH), np.uint8, order="F")
    mask[20:45, 10:50] = 1
    return mask


def runs(mask):
    """The lengths of runs outside and inside, down the columns."""
    flat = mask.flatten(order="F")
    ends = [0, *(np.flatnonzero(np.diff(flat)) + 1).tolist(), flat.size]
    return [0] * int(flat[0]) + np.diff(ends).tolist()


def text(mask):
    return coco_mask.encode(np.asfortranarray(mask))["counts"].decode()


def content(*segmentations, names=("0.png",), **image):
    """One annotation for each segmentation, each of another category of the first image."""
    size = {"width": WIDTH, "height": HEIGHT}
    return {
        "images": [{"id": n, "file_name": name, **size, **image} for n, name in enumerate(names)],
        "categories": [{"id": n, "name": f"thing {n}"} for n in range(max(1, len(segmentations)))],
        "annotations": [
            {"id": 100 + n, "image_id": 0, "category_id": n, **({} if part is None else {"segmentation": part})}
            for n, part in enumerate(segmentations)
        ],
    }


def write(file: Path, found):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found))


def prepare(folder, **changes):
    return prepare_records(folder, **{"task": "segmentation", "height": HEIGHT, "width": WIDTH, **changes})


def read(path, **changes):
    items = list(find_records(data_config(path, task="segmentation", **changes)).read())
    return tuple([item for item in items if isinstance(item, kind)] for kind in (Record, Rejected, Note))


SIZE = [HEIGHT, WIDTH]


def test_polygons_and_run_lengths_cover_what_pycocotools_covers(tmp_path):
    ellipse = [[60 + 30.3 * np.cos(t), 50 + 20.7 * np.sin(t)] for t in np.linspace(0, 6.2, 30)]
    ellipse = [np.ravel(ellipse).tolist()]
    drawn = coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(ellipse, HEIGHT, WIDTH)))
    parts = [POLYGON, {"counts": runs(pixels()), "size": SIZE}, {"counts": text(pixels()), "size": SIZE}, ellipse]
    found = content(*parts)
    crowd = {"image_id": 0, "category_id": 0, "iscrowd": 1, "segmentation": {"counts": [HEIGHT * 100, HEIGHT * 60]}}
    found["annotations"].append(crowd)
    write(tmp_path / "data/coco.json", found)
    picture(tmp_path / "data/0.png", (WIDTH, HEIGHT))
    union, *others = (read_mask(record.target_image).numpy() for record in prepare(tmp_path))
    wanted = pixels() > 0
    assert (union[:, :100] == wanted[:, :100]).all()
    assert union[:, 100:].all()
    assert all((mask == wanted).all() for mask in others[:2])
    assert wanted.sum() == 1000
    assert (others[2] == drawn).all()
    assert drawn.sum() > 1900


@given(st.integers(1, 40), st.integers(1, 40), st.randoms(use_true_random=False))
def test_the_text_of_run_lengths_is_decoded(height, width, random):
    mask = np.array([random.random() < random.choice((0.05, 0.5, 0.95)) for _ in range(height * width)], np.uint8)
    mask = mask.reshape(height, width)
    assert _decoded(text(mask)) == runs(mask)


BROKEN = {
    "no segmentation": (None, "annotation 100 of image 0: it has no segmentation"),
    "no polygons": ([], "annotation 100 of image 0: it has no segmentation"),
    "a box": ([[10, 20, 40, 25]], "a polygon needs x and y of three points or more, got [10, 20, 40, 25]"),
    "an odd number": ([[10, 20, 50, 20, 50, 45, 10]], "a polygon needs x and y of three points or more"),
    "not nested": (POLYGON[0], "a polygon needs x and y of three points or more, got 10"),
    "no number": ([[10, 20, 50, 20, 50, "45"]], "a polygon lies far outside the 160x96 pixels"),
    "far outside": ([[10, 20, 5e9, 20, 50, 45]], "a polygon lies far outside the 160x96 pixels"),
    "fractions": ([[0.1, 0.1, 0.5, 0.1, 0.5, 0.6]], "within one pixel, as if they were fractions of the image's size"),
    "not a number": ([[10, 20, float("nan"), 20, 50, 45]], "a polygon lies far outside the 160x96 pixels"),
    "another size": ({"counts": [40 * 60], "size": [40, 60]}, "have the size [40, 60], and its image [96, 160]"),
    "turned": ({"counts": runs(pixels().T), "size": SIZE[::-1]}, "have the size [160, 96], and its image [96, 160]"),
    "too short": ({"counts": [5, 10], "size": SIZE}, "its run lengths do not cover the 15360 pixels of its image"),
    "too long": ({"counts": [5, 20000], "size": SIZE}, "do not cover the 15360 pixels"),
    "negative": ({"counts": [-5, 15365], "size": SIZE}, "do not cover the 15360 pixels"),
    "short text": ({"counts": "PQ1", "size": SIZE}, "do not cover the 15360 pixels"),
    "endless text": ({"counts": "oooo", "size": SIZE}, "do not cover the 15360 pixels"),
    "a number without end": ({"counts": "o" * 8, "size": SIZE}, "its run lengths are not COCO's text"),
    "no text": ({"counts": "é\u0000", "size": SIZE}, "its run lengths are not COCO's text"),
    "no counts": ({"size": SIZE}, "KeyError: 'counts'"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_annotation_rejects_its_query_only(kind, tmp_path):
    segmentation, message = BROKEN[kind]
    write(tmp_path / "coco.json", content(segmentation, POLYGON))
    (record,), (rejected,), _ = read(tmp_path)
    assert record.prompt == "thing 1"
    assert rejected.reason == "wrong_mask"
    assert message in rejected.message


@pytest.mark.parametrize(
    "image",
    [{"width": 0}, {"height": -96}, {"height": "high"}, {"height": float("inf")}, {"width": None}, {"file_name": 5}],
)
def test_an_image_without_a_size_or_name_rejects_its_query(image, tmp_path):
    write(tmp_path / "coco.json", content(POLYGON, **image))
    records, (rejected,), _ = read(tmp_path)
    assert records == []
    assert "image 0 lacks a proper file_name, width or height" in rejected.message


def test_a_query_whose_image_is_missing_or_ambiguous_is_rejected(tmp_path):
    found = content(POLYGON, names=("0.png", "1.png"))
    found["images"] += [{**found["images"][1], "file_name": "other.png"}, {"id": 5, "file_name": "5.png"}]
    annotation = found["annotations"][0]
    found["annotations"] += [{**annotation, "image_id": n} for n in (1, 5, 9)] + [{"image_id": 0}, "x"]
    found["annotations"] += [{**annotation, "category_id": 77}]
    write(tmp_path / "coco.json", found)
    records, rejected, _ = read(tmp_path)
    assert len(records) == 1
    messages = [item.message for item in rejected]
    assert messages[0] == "annotation 5 names no image and category (KeyError: 'category_id')"
    assert messages[1].startswith("annotation 6 names no image and category (TypeError")
    assert messages[2] == "2 images have the id 1"
    assert messages[3] == "image 5 lacks a proper file_name, width or height (KeyError: 'height')"
    assert messages[4] == "0 images have the id 9"
    assert messages[5] == "the categories have no name of the id 77, which would be the query"


LAYOUTS = {
    "beside": (["coco.json"], ["0.png"], ".", {}, "0.png"),
    "in a folder": (["coco.json"], ["images/0.png"], ".", {}, "images/0.png"),
    "train by default": (
        ["annotations/instances_train.json", "annotations/instances_val.json"],
        ["train/0.png", "val/0.png"],
        ".",
        {},
        "train/0.png",
    ),
    "the split that is asked for": (
        ["annotations/instances_train2017.json", "annotations/instances_val2017.json"],
        ["train2017/0.png", "val2017/0.png"],
        ".",
        {"split": "validation"},
        "val2017/0.png",
    ),
    "only val": (["annotations/instances_val.json"], ["train/0.png", "val/0.png"], ".", {}, "val/0.png"),
    "nested": (
        ["annotations/instances_val.json"],
        ["images/train/0.png", "images/val/0.png"],
        ".",
        {},
        "images/val/0.png",
    ),
    "the file": (
        ["annotations/instances_train.json", "annotations/instances_val.json"],
        ["train/0.png", "val/0.png"],
        "annotations/instances_val.json",
        {},
        "val/0.png",
    ),
    "the folder of annotations": (["annotations/coco.json"], ["0.png"], "annotations", {}, "0.png"),
    "the file's own path": (["coco.json"], ["0.png", "small/0.png"], ".", {}, "0.png"),
    "beside keypoints": (
        ["annotations/instances_train.json", "annotations/person_keypoints_train.json"],
        ["train/0.png"],
        ".",
        {},
        "train/0.png",
    ),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_images_of_an_annotation_file_are_those_of_its_split(kind, tmp_path):
    files, images, path, changes, wanted = LAYOUTS[kind]
    for file in files:
        write(tmp_path / "data" / file, content(POLYGON))
    colours = {name: (number * 100 + 50, 0, 0) for number, name in enumerate(images)}
    for name, colour in colours.items():
        picture(tmp_path / "data" / name, (WIDTH, HEIGHT), colour)
    (record,) = table = prepare(tmp_path, path=str(tmp_path / "data" / path), **changes)
    assert read_image(record.source_images[0]).getpixel((0, 0)) == colours[wanted]
    other = {"train/0.png": "validation", "val2017/0.png": "train"}.get(wanted)
    others = [f"the data's {other} is not used"] if len(images) > 1 and path == "." and len(files) > 1 else []
    only = ["the data's only split is validation"] if kind in ("only val", "nested") else []
    assert [warning.split(":")[0] for warning in table.report["warnings"]] == others + only


@pytest.mark.parametrize(
    ("file", "images", "message"),
    [
        ("coco.json", ["train/0.png", "val/0.png"], "0.png may be train/0.png or val/0.png"),
        ("coco.json", ["a/0.png", "b/0.png"], "0.png may be a/0.png or b/0.png"),
        ("val.json", ["val/a/0.png", "val/b/0.png"], "0.png may be val/a/0.png or val/b/0.png"),
        ("val.json", ["train/0.png", "val/1.png"], "image '0.png' does not exist"),
    ],
)
def test_an_image_that_may_be_another_is_rejected(file, images, message, tmp_path):
    write(tmp_path / "data" / file, content(POLYGON))
    for name in images:
        picture(tmp_path / "data" / name, (WIDTH, HEIGHT))
    with pytest.raises(UserError, match=message):
        prepare(tmp_path)


@pytest.mark.parametrize(
    ("files", "changes", "message"),
    [
        (["a.json", "b.json"], {}, "has several annotation files of one split, a.json, b.json. Give one as data.path"),
        (
            ["instances_val.json", "instances_test.json"],
            {},
            "has the splits test, validation: choose one with data.split",
        ),
        (["instances_train.json", "instances_val.json"], {"split": "test"}, "has the splits train, validation."),
        (["coco.json"], {"split": "train"}, "has no splits"),
    ],
)
def test_without_one_file_of_the_split_nothing_is_read(files, changes, message, tmp_path):
    for file in files:
        write(tmp_path / file, content(POLYGON))
    with pytest.raises(UserError) as error:
        read(tmp_path, **changes)
    assert message in str(error.value)


def test_the_queries_are_counted_as_they_are_read(tmp_path):
    """Also where the pictures' folders, not the file, say the split, and annotations are broken."""
    found = content(POLYGON, None, {"counts": [1]}, names=("train/0.png", "val/1.png", "test_tubes/2.png", "3.png"))
    annotation = found["annotations"][0]
    found["annotations"] += [{**annotation, "image_id": n} for n in (1, 2, 3, 9)]
    write(tmp_path / "coco.json", found)
    for name in ("train/0.png", "val/1.png", "test_tubes/2.png", "3.png"):
        picture(tmp_path / name)
    for split in ("all", "train", "val", None):
        source = find_records(data_config(tmp_path, task="segmentation", split=split))
        assert source.count() == len([item for item in source.read() if not isinstance(item, Note)])
    assert source.splits == {"train": 1, "validation": 1, None: 5}


@pytest.mark.parametrize(("named", "stored"), [("a\\0.png", "a/0.png"), ("e\u0301.png", "b/\u00e9.png")])
def test_an_image_is_found_by_windows_names_and_in_another_unicode_form(named, stored, tmp_path):
    write(tmp_path / "coco.json", content(POLYGON, names=(named,)))
    picture(tmp_path / stored)
    ((record,), _, _) = read(tmp_path)
    assert record.source_images == stored


def test_a_mask_of_another_size_than_its_image_is_rejected(tmp_path):
    write(tmp_path / "data/coco.json", content(POLYGON))
    Image.new("RGB", (HEIGHT, WIDTH)).save(tmp_path / "data/0.png")
    with pytest.raises(UserError, match="the mask is 160x96 pixels, the upright image 96x160"):
        prepare(tmp_path)


def test_other_json_and_damaged_files_are_not_taken_for_coco(tmp_path):
    (tmp_path / "settings.json").write_text('{"images": 1, "annotations": 2}')
    with pytest.raises(UserError, match="no records found"):
        read(tmp_path)
    (tmp_path / "coco.json").write_text('{"images": 1, "annotations": 2, "categories": []}')
    with pytest.raises(UserError, match=r"coco\.json is not a COCO file \(TypeError"):
        read(tmp_path)


def test_an_annotation_file_that_leads_outside_is_refused(tmp_path):
    write(tmp_path / "private/coco.json", content(POLYGON))
    (tmp_path / "data").mkdir()
    (tmp_path / "data/coco.json").symlink_to(tmp_path / "private/coco.json")
    with pytest.raises(UserError, match=r"coco\.json leads outside"):
        read(tmp_path / "data")


def test_captions_are_records_of_pictures_even_beside_objects(tmp_path):
    images = [{"id": n, "file_name": f"{n}.png"} for n in range(2)]
    annotations = [{"id": n, "image_id": n // 2, "caption": f"caption {n}"} for n in range(4)]
    annotations += [{"id": 9, "image_id": 7, "caption": "of none"}, {"id": 10, "image_id": 1}]
    for split in ("train", "val"):
        write(tmp_path / f"data/annotations/instances_{split}2017.json", content(POLYGON))
        found = {"images": images, "annotations": annotations}
        write(tmp_path / f"data/annotations/captions_{split}2017.json", found)
        for n in range(2):
            picture(tmp_path / f"data/{split}2017/{n}.png", (WIDTH, HEIGHT), (90 * n, 30, 200 if split == "val" else 0))
    table = prepare_records(tmp_path)
    assert (table.report["layout"], len(table)) == ("coco_captions", 4)
    assert {record.prompt: record.target_file for record in table} == {
        f"caption {n}": f"train2017/{n // 2}.png" for n in range(4)
    }
    assert len({record.metadata["image_id"] for record in table}) == 2
    assert [one["reason"] for one in table.report["rejected"]["listed"]] == ["missing_source", "empty_prompt"]
    assert prepare_records(tmp_path, task="segmentation").report["layout"] == "coco"
