"""From a folder of records to the manifest."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageOps

from tests.data.making import data_config, jsonl, mask, picture, prepare
from visual_grpo.common.errors import UserError
from visual_grpo.common.images import fit, read_image, read_size
from visual_grpo.data.manifest import FEW_PROMPTS, RecordTable
from visual_grpo.data.preparation import Preparation, with_ids
from visual_grpo.data.record import Place, Record


def rows(folder):
    return {row["id"]: row for row in pq.read_table(folder / "out/records.parquet").to_pylist()}


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def files(folder):
    return {path.name: path.stat().st_mtime_ns for path in (folder / "out/images").iterdir()}


def many(folder, count):
    return jsonl(folder / "data/records.jsonl", [{"id": n, "prompt": f"a cat {n}"} for n in range(count)])


def test_the_manifest_says_what_was_found_and_made(tmp_path):
    data = tmp_path / "data"
    photo = Image.effect_noise((80, 120), 90).convert("RGB")
    photo.getexif()[0x0112] = 6
    data.mkdir()
    photo.save(data / "t.jpg", exif=photo.getexif())
    picture(data / "s.png", (64, 32), "blue")
    row = {"id": "x", "prompt": "a cat", "target_image": "t.jpg", "source_image": ["s.png"], "k": [1, "猫"]}
    jsonl(data / "records.jsonl", [row])
    table = prepare(tmp_path, task="i2i")
    (record,) = table
    said = "source and target have different shapes: each is cropped by itself"
    assert f"1 edit (such as records.jsonl, line 1) {said}" in table.report["warnings"]

    assert (record.id, record.prompt, record.split) == ("x", "a cat", "train")
    assert record.metadata == {"k": [1, "猫"]}
    assert record.target_image.is_absolute()
    expected = fit(read_image(data / "t.jpg"), height=32, width=64)
    assert np.array_equal(np.asarray(read_image(record.target_image)), np.asarray(expected))
    assert read_image(record.source_images[0]).getpixel((5, 5)) == (0, 0, 255)

    stored = rows(tmp_path)["x"]
    assert not stored["target_image"].startswith("/")
    assert (stored["original_width"], stored["original_height"]) == (120, 80)
    assert stored["target_sha256"] == sha256(record.target_image)
    assert stored["source_sha256"] == [sha256(record.source_images[0])]


def test_rejected_records_are_reported_and_the_others_kept(tmp_path):
    data = tmp_path / "data"
    picture(data / "good.png")
    picture(data / "small.png", (31, 500))
    (data / "corrupt.png").write_bytes(b"nonsense")
    (data / "empty.png").touch()
    good = {"id": "a", "prompt": "a cat", "target_image": "good.png"}
    bad = {
        "a": ({"prompt": "again"}, "duplicate_id"),
        "b": ({"prompt": " "}, "empty_prompt"),
        "c": ({"target_image": f"{'long' * 70}.png"}, "missing_target"),
        "d": ({"target_image": "corrupt.png"}, "corrupt_image"),
        "e": ({"target_image": "empty.png"}, "corrupt_image"),
        "f": ({"target_image": "small.png"}, "image_too_small"),
        "g": ({"source_image": "corrupt.png"}, "corrupt_image"),
    }
    rows = [{**good, **change, "id": name} for name, (change, _) in bad.items()]
    jsonl(data / "records.jsonl", [good, *rows, {**good, "id": "h", "k": 1}, "not json"])
    table = prepare(tmp_path, task="mixed")
    assert [record.id for record in table] == ["a", "h"]
    report = table.report
    assert (report["records"], report["accepted"]) == (10, 2)
    listed = report["rejected"]["listed"]
    expected: list[tuple[str | None, int, str]] = [
        (name, line, reason) for line, (name, (_, reason)) in enumerate(bad.items(), 2)
    ]
    expected.append((None, 10, "not_json"))
    assert [(entry["id"], entry["line"], entry["reason"]) for entry in listed] == expected
    assert all(entry["message"] and entry["remedy"] for entry in listed)
    assert "31x500 pixels" in listed[5]["message"]
    assert "corrupt.png: cannot be read as an image" in listed[6]["message"]
    assert report["rejected"]["total"] == 8
    assert report["rejected"]["by_reason"]["corrupt_image"] == 3
    assert "2 images (such as records.jsonl, line 1) smaller than the prepared size: enlarged" in report["warnings"]


def test_nothing_left_to_train_on_is_an_error(tmp_path):
    for rows, message in (
        ([], "The data have no records"),
        ([{"prompt": ""}] * 8, r"8 records rejected:(?s:.*)and 3 more"),
    ):
        jsonl(tmp_path / "data/records.jsonl", rows)
        with pytest.raises(UserError, match=message):
            prepare(tmp_path)
    rows = [{"prompt": "a cat", "split": "test"}, {"prompt": "a cat", "split": "train"}, {"prompt": ""}]
    jsonl(tmp_path / "data/list.jsonl", rows)
    (tmp_path / "data/records.jsonl").unlink()
    message = (
        r"Of 1 usable record none is left to train on: all are in data.held_out_split \(test\).* 2 records rejected:\n"
    )
    with pytest.raises(UserError, match=message):
        prepare(tmp_path, held_out_split="test")


@pytest.mark.parametrize(
    ("count", "share", "said"),
    [
        (
            1,
            0.25,
            "1 record: 1 train, 0 eval, 0 held out. 1 independent prompt is too few to hold any out"
            " (at least 8 are needed)",
        ),
        (
            6,
            0.25,
            "6 records: 6 train, 0 eval, 0 held out. 6 independent prompts are too few to hold any out"
            " (at least 8 are needed)",
        ),
        (12, 0.25, "12 records: 9 train, 1 eval, 2 held out. Fewer than 10 independent prompts are held out"),
        (200, 0.02, "200 records: 170 train, 27 eval, 3 held out. Fewer than 10 independent prompts are held out"),
        (60, 0.25, None),
    ],
)
def test_what_became_of_too_few_records_is_told_and_only_of_many_the_share_is_raised(tmp_path, count, share, said):
    many(tmp_path, count)
    warnings = prepare(tmp_path, held_out_share=share, eval_share=0.1).report["warnings"]
    if said is None:
        assert warnings == []
        return
    (warning,) = warnings
    assert warning.startswith(said)
    assert warning.endswith("Add records with other prompts" + ", or raise data.held_out_share" * (count == 200))


def test_a_held_out_split_of_which_nothing_is_usable_is_told(tmp_path):
    jsonl(tmp_path / "data/list.jsonl", [{"prompt": "a", "split": "train"}, {"prompt": "", "split": "test"}])
    (warning,) = prepare(tmp_path, held_out_split="test").report["warnings"]
    assert "1 train, 0 eval, 0 held out. No record of the split test is usable, so nothing can judge a gain" in warning


def test_twelve_photos_hold_out_a_few_and_six_clips_none(tmp_path):
    for number in range(6):
        for count, held_out in ((12, {2, 3, 4}), (6, {0})):
            rows = [{"prompt": f"photo {number}-{n}"} for n in range(count)]
            jsonl(tmp_path / "data/records.jsonl", rows)
            assert len(prepare(tmp_path, held_out_share=0.25, eval_share=0.1).split("held_out")) in held_out


def test_few_held_out_prompts_are_counted_as_an_evaluation_counts_them(tmp_path):
    many(tmp_path, 60)
    table = prepare(tmp_path, held_out_share=0.2)
    held_out = [record.prompt for record in table.split("held_out")]
    others = [record.prompt for record in table.split("train")]
    for prompts in (FEW_PROMPTS - 1, FEW_PROMPTS):
        rows = [{"prompt": prompt} for prompt in [*held_out[:prompts] * 3, *others]]
        jsonl(tmp_path / "data/records.jsonl", rows)
        table = prepare(tmp_path, held_out_share=0.2)
        assert len({record.prompt for record in table.split("held_out")}) == prompts
        few = [warning for warning in table.report["warnings"] if "too few to judge" in warning]
        assert len(few) == (prompts < FEW_PROMPTS)


def test_of_queries_the_images_are_independent(tmp_path):
    """Many images of one class, and many queries about one image."""
    mask(tmp_path / "data/m.png", (40, 40), (4, 4, 19, 19))
    for number in range(40):
        picture(tmp_path / f"data/{number}.png", colour=(number, 0, 0))
    row = {"query": "box", "mask": "m.png"}
    many, few = ([{**row, "image": f"{n % images}.png", "query": f"box {n}"} for n in range(40)] for images in (40, 6))
    for rows in ([{**row, "query": "box"} for row in many], few):
        jsonl(tmp_path / "data/records.jsonl", rows)
        table = prepare(tmp_path, task="segmentation", width=32, held_out_share=0.5)
        images = {record.split_group for record in table.split("held_out")}
        (warning,) = table.report["warnings"] or [""]
        assert ("independent images" in warning) == (len(images) < FEW_PROMPTS)


def test_sealed_records_are_counted_and_too_few_are_told(tmp_path):
    many(tmp_path, 40)
    before = {record.id: record.split for record in prepare(tmp_path, held_out_share=0.25)}
    table = prepare(tmp_path, held_out_share=0.25, sealed_share=0.3)
    sealed = list(table.split("sealed"))
    assert table.report["splits"]["sealed"] == {"records": len(sealed), "prompts": len(sealed)}
    assert 4 < len(sealed) < 20
    assert {before[record.id] for record in sealed} == {"train"}
    assert all(before[record.id] == record.split for record in table.split("train", "eval", "held_out"))
    assert len(table.split("train", "held_out")) + len(sealed) == 40
    many(tmp_path, 7)
    assert prepare(tmp_path, sealed_share=0.25).report["warnings"] == ["the split sealed is empty: 7 records in all"]


def test_splits_keep_prompts_apart_and_do_not_depend_on_order(tmp_path):
    records = [{"prompt": f"prompt {n % 30}", "k": n} for n in range(120)]
    jsonl(tmp_path / "data/records.jsonl", records)
    table = prepare(tmp_path, eval_share=0.2, held_out_share=0.3)
    held_out, train, eval_ = ({record.prompt for record in table.split(name)} for name in ("held_out", "train", "eval"))
    assert held_out
    assert train & eval_
    assert not held_out & (train | eval_)
    assert table.report["splits"]["held_out"] == {"records": 4 * len(held_out), "prompts": len(held_out)}
    before = Counter((record.prompt, record.split) for record in table)
    jsonl(tmp_path / "data/records.jsonl", records[::-1])
    after = prepare(tmp_path, eval_share=0.2, held_out_share=0.3)
    assert Counter((record.prompt, record.split) for record in after) == before


def test_a_group_or_one_instruction_with_one_source_is_held_out_as_a_whole(tmp_path):
    for number in range(8):
        picture(tmp_path / f"data/{number}.png", colour=(number, 0, 0))
    rows: list[dict[str, object]] = [
        {"prompt": f"p{n}", "group": f"g{n % 12}", "source_image": "0.png", "of": f"g{n % 12}"} for n in range(60)
    ]
    for number in range(40):
        name = f"{number % 8}.png"
        rows.append({"prompt": "make it red", "source_image": name, "of": name, "k": number})
    jsonl(tmp_path / "data/records.jsonl", rows)
    table = prepare(tmp_path, held_out_share=0.5, task="i2i")
    units = {(record.metadata["of"], record.split_group, record.split) for record in table}
    assert len(units) == len({of for of, _, _ in units}) == len({unit for _, unit, _ in units}) == 20
    for mark in ("png", "g"):
        assert {split for of, _, split in units if of.lstrip("0123456789.").startswith(mark)} == {"train", "held_out"}


def test_a_second_run_reuses_the_images_except_changed_ones(tmp_path):
    data = tmp_path / "data"
    for name in ("a", "b", "c"):
        picture(data / f"{name}.png")
    names = [{"id": name, "prompt": name, "target_image": f"{name}.png"} for name in "abc"]
    jsonl(data / "records.jsonl", names)
    first = prepare(tmp_path)
    before, digest = files(tmp_path), first.digest
    second = prepare(tmp_path)
    assert files(tmp_path) == before
    assert second.digest == digest
    assert rows(tmp_path)["a"]["original_width"] == 40

    picture(data / "a.png", colour="blue")
    jsonl(data / "records.jsonl", names[:2])
    third = prepare(tmp_path)
    after = files(tmp_path)
    assert len(after) == 2
    assert len(set(after) & set(before)) == 1
    assert read_image(third[0].target_image).getpixel((0, 0)) == (0, 0, 255)
    assert third.digest != digest
    other_size = prepare(tmp_path, height=64)
    assert read_size(other_size[1].target_image) == (64, 64)


def test_a_run_that_fails_leaves_the_old_manifest_and_its_images_and_a_damaged_one_is_prepared_again(tmp_path):
    data = tmp_path / "data"
    picture(data / "a.png")
    good = {"id": "a", "prompt": "a", "target_image": "a.png"}
    jsonl(data / "records.jsonl", [good])
    table = prepare(tmp_path)
    (image,) = (tmp_path / "out/images").iterdir()
    before = image.read_bytes()
    image.write_bytes(before[:-20])
    prepare(tmp_path)
    assert image.read_bytes() == before
    picture(data / "a.png", colour="blue")
    jsonl(data / "records.jsonl", [good, {"prompt": ""}, "not json"])
    with pytest.raises(UserError, match=r"records.jsonl, line 2.*the prompt is empty.*data.strict"):
        prepare(tmp_path, strict=True)
    table = RecordTable(table.path)
    assert [record.id for record in table] == ["a"]
    assert table[0].target_image == image
    assert image.read_bytes() == before


def test_a_made_id_depends_on_folder_prompt_and_images_and_not_on_other_records():
    def ids(items):
        return [item.id for item in with_ids(items) if isinstance(item, Record)]

    first = Record(place=Place("a/records.jsonl", 1), folder=Path(), prompt="p", target_image="t", source_images="s")
    other = replace(first, source_images="r"), replace(first, place=Place("b/records.jsonl", 1))
    records = [first, replace(first, prompt="q"), replace(first, target_image="u"), *other]
    made = ids(iter(records))
    assert len(set(made)) == len(records)
    assert ids(reversed(records)) == made[::-1]


def test_any_id_gives_a_safe_file_name_of_its_own(tmp_path):
    picture(tmp_path / "data/a.png")
    ids = ["../../etc/passwd", "a/b", "a_b", "A_B", "红", "绿", ".", "x" * 5000, "a\nb", "CON"]
    records = [{"id": name, "prompt": "a", "target_image": "a.png"} for name in ids]
    jsonl(tmp_path / "data/records.jsonl", records)
    table = prepare(tmp_path)
    assert [record.id for record in table] == ids
    names = [record.target_image.name for record in table]
    assert len({name.lower() for name in names}) == len(ids)
    assert all(name.isascii() and len(name) < 120 and not set(name) & set('/\\:*?"<>|\n') for name in names)
    assert all(record.target_image.resolve().parent == tmp_path / "out/images" for record in table)


def test_a_file_name_that_is_not_utf8(tmp_path):
    picture(tmp_path / "data/a.png").rename(tmp_path / "data/\udcff.png")
    (tmp_path / "data/\udcff.txt").write_text("a cat")
    table = prepare(tmp_path, layout="captions")
    assert [record.prompt for record in table] == ["a cat"]
    json.dumps(table.report, ensure_ascii=False).encode()


def test_odd_exif_data_neither_reject_a_photo_nor_warn(tmp_path):
    jsonl(tmp_path / "data/records.jsonl", [{"prompt": "a", "target_image": "a.jpg"}])
    Image.new("RGB", (64, 32)).save(tmp_path / "data/a.jpg", exif=b"Exif\0\0MM\0\x2a\xff\xff\xff\xff")
    report = prepare(tmp_path).report
    assert (report["accepted"], report["warnings"]) == (1, [])


def test_progress_counts_every_record_and_no_note(tmp_path):
    for number in range(12):
        picture(tmp_path / f"data/images/{number}.png", (64, 64))
    rows = [{"prompt": f"a {number}", "file_name": f"../images/{number}.png"} for number in range(12)]
    jsonl(tmp_path / "data/train/metadata.jsonl", rows)
    calls: list[None] = []
    preparation = Preparation(data_config(tmp_path / "data", eval_share=0.1, held_out_share=0.2))
    preparation.write(tmp_path / "out/records.parquet", lambda: calls.append(None))
    assert RecordTable(tmp_path / "out/records.parquet").report["warnings"]
    assert len(calls) == preparation.source.count() == 12


def test_shares_that_leave_nothing_are_refused_by_the_configuration():
    with pytest.raises(ValueError, match="eval_share \\+ held_out_share \\+ sealed_share must be below 1"):
        data_config("x", eval_share=0.6, held_out_share=0.4)


ODD = ("jpg", "png", "webp", "gif", "tif", "bmp", "cmyk.jpg", "16.png", "alpha.png", "palette.png", "grey.png")
"""Ends of the crops' file names."""


def odd_crop(path, number):
    """Writes a noisy crop of its own size and EXIF orientation; returns its upright pixels in RGB, before any loss."""
    kind = path.name.partition("-")[2].partition(".")[2]
    dice = np.random.default_rng(number)
    pixels = dice.integers(0, 256, (int(dice.integers(64, 120)), int(dice.integers(64, 120)), 3), dtype=np.uint8)
    image = {
        "cmyk.jpg": lambda rgb: rgb.convert("CMYK"),
        "16.png": lambda rgb: Image.fromarray(np.asarray(rgb.convert("L")).astype(np.uint16) * 257),
        "alpha.png": lambda rgb: Image.fromarray(np.dstack([pixels, pixels[..., 0]])),
        "palette.png": lambda rgb: rgb.quantize(64),
        "gif": lambda rgb: rgb.quantize(64),
        "grey.png": lambda rgb: rgb.convert("L"),
    }.get(kind, lambda rgb: rgb)(Image.fromarray(pixels))
    exif = image.getexif()
    exif[0x0112] = 1 + number % 8 if kind in ("jpg", "png", "webp", "cmyk.jpg", "alpha.png") else 1
    image.save(path, **({} if kind in ("gif", "bmp") else {"exif": exif}))
    with Image.open(path) as stored:
        upright = ImageOps.exif_transpose(stored)
        if kind == "16.png":
            return Image.fromarray(np.rint(np.asarray(upright) / 257).astype(np.uint8)).convert("RGB")
        if kind == "alpha.png":
            return Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright).convert("RGB")
        return upright.convert("RGB")


@pytest.mark.parametrize("count", [88, pytest.param(800, marks=pytest.mark.slow)])
def test_odd_crops_are_prepared_with_exactly_their_pixels(tmp_path, count):
    (tmp_path / "data").mkdir()
    expected = {}
    for number in range(count):
        name = f"{number:03}-.{ODD[number % len(ODD)]}"
        upright = odd_crop(tmp_path / "data" / name, number // len(ODD))
        (tmp_path / f"data/{name}").with_suffix(".txt").write_text(f"crop {number}")
        expected[f"crop {number}"] = ImageOps.fit(upright, (64, 64), Image.Resampling.LANCZOS)
    (tmp_path / "data/broken.jpg").write_bytes((tmp_path / "data/000-.jpg").read_bytes()[:500])
    (tmp_path / "data/broken.txt").write_text("broken")
    table = prepare(tmp_path, height=64)
    assert len(table) == count
    assert table.report["rejected"]["by_reason"] == {"corrupt_image": 1}
    for record in table:
        assert np.array_equal(np.asarray(read_image(record.target_image)), np.asarray(expected[record.prompt]))


def test_held_out_pictures_that_look_like_pictures_that_train_are_named(tmp_path):
    data, rng = tmp_path / "data", np.random.default_rng(0)
    for number in range(12):
        split = ("train", "test")[number % 2]
        small = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        photo = small.resize((256, 128), Image.Resampling.BICUBIC)
        (data / split).mkdir(parents=True, exist_ok=True)
        photo.save(data / f"{split}/{number}.png")
        (data / f"{split}/{number}.txt").write_text(f"photo {number}")
        if number < 4:  # The same photo on the other side, as people have it: encoded anew, and scaled.
            other = data / ("test", "train")[number % 2]
            other.mkdir(exist_ok=True)
            photo.resize((192, 96)).save(other / f"copy{number}.jpg", quality=60)
            (other / f"copy{number}.txt").write_text(f"another photo {number}")
    for name, colour in (("train/plain", 10), ("test/plain", 12)):
        picture(data / f"{name}.png", (64, 32), (colour, 10, 10)).with_suffix(".txt").write_text(name)
    for _ in range(2):  # The second finds the prepared files.
        report = prepare(tmp_path, held_out_split="test").report
        (said,) = [warning for warning in report["warnings"] if "look like" in warning]
        pairs = "test/1.png and train/copy1.jpg, test/3.png and train/copy3.jpg"
        assert said.startswith("4 held-out records look like one that trains (")
        assert pairs in said
        assert "test/copy0.jpg and train/0.png, test/copy2.jpg and train/2.png" in said


def test_no_note_names_a_sealed_picture(tmp_path):
    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    photo = small.resize((256, 128), Image.Resampling.BICUBIC)
    (tmp_path / "data").mkdir()
    for number in range(16):  # Each looks like every other.
        photo.save(tmp_path / f"data/{number:02}.jpg", quality=60 + number)
        (tmp_path / f"data/{number:02}.txt").write_text(f"photo {number}")
    table = prepare(tmp_path, held_out_share=0.25, sealed_share=0.25)
    (said,) = [warning for warning in table.report["warnings"] if "look like" in warning]
    rows = [(row["target_file"], row["split"]) for row in table.rows()]
    sealed = [name for name, split in rows if split == "sealed"]
    assert min(sealed) < min(name for name, split in rows if split == "train"), "it would be named first"
    assert not any(name in said for name in sealed)
