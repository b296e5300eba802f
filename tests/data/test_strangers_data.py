"""Datasets as people have them: what was given is used, or said with its reason, and no split leaks into another."""

from __future__ import annotations

import json
import tarfile
import unicodedata
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms

from tests.data.making import data_config, embedded, jsonl, parquet, picture, prepare
from visual_grpo.common.errors import UserError
from visual_grpo.common.images import read_image
from visual_grpo.data.columns import EMPTY, INFINITE, METADATA, PARTLY
from visual_grpo.data.preparation import Preparation
from visual_grpo.data.splits import split_in_path, usual_name
from visual_grpo.operations.preflight.findings import look_at_folder

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def colour(number: int) -> tuple[int, int, int]:
    return (number % 256, number // 256, 90)


def captioned(path: Path, number: int, suffix: str = ".txt") -> Path:
    picture(path, colour=colour(number)).with_suffix(suffix).write_text(f"picture {number}")
    return path


def split_folders(data: Path, names=("train", "validation", "test")) -> None:
    """Six pictures with captions in each folder."""
    for k, name in enumerate(names):
        for n in range(6):
            captioned(data / name / f"{n}.png", 10 * k + n)


def refusal(folder, **changes):
    with pytest.raises(UserError) as error:
        prepare(folder, **changes)
    return str(error.value)


def captions(data):
    split_folders(data, ("train", "test"))


def root_metadata(data):
    names = [f"{split}/{n}.png" for split in ("train", "test") for n in range(6)]
    for number, name in enumerate(names):
        picture(data / name, colour=colour(number))
    jsonl(data / "metadata.jsonl", [{"file_name": name, "text": f"picture {n}"} for n, name in enumerate(names)])


def metadata_in_folders(data):
    for k, split in enumerate(("training", "test2017")):
        for n in range(6):
            picture(data / split / f"{n}.png", colour=colour(10 * k + n))
        rows = [{"file_name": f"{n}.png", "text": f"{split} {n}"} for n in range(6)]
        jsonl(data / split / "metadata.jsonl", rows)


def parquets(data):
    for k, split in enumerate(("train", "test")):
        rows = [{"text": f"{split} {n}", "image": embedded(colour=f"#{k}{n}0000")} for n in range(6)]
        parquet(data / f"data/{split}-00000-of-00001.parquet", rows)


def column(data):
    splits = ("train", "test")
    parquet(data / "all.parquet", [{"text": f"{split} {n}", "split": split} for split in splits for n in range(6)])


def column_of_another_name(data):
    rows = [{"caption": f"{split} {n}", "Partition": split.upper()} for split in ("train", "test") for n in range(6)]
    jsonl(data / "list.jsonl", rows)


def json_lines(data):
    for split in ("train", "test"):
        rows = [{"prompt": f"{split} {n}", "include": [{"class": "cup", "count": n}]} for n in range(6)]
        jsonl(data / f"{split}_metadata.jsonl", rows)


LAYOUTS = (captions, root_metadata, metadata_in_folders, parquets, column, column_of_another_name, json_lines)


class TestSplits:
    @pytest.mark.parametrize("make", LAYOUTS)
    def test_only_train_is_read_unless_another_split_is_asked_for(self, tmp_path, make):
        make(tmp_path / "data")
        table = prepare(tmp_path)
        assert table.report["found_splits"] == {
            "train": {"records": 6, "used": True},
            "test": {"records": 6, "used": False},
        }
        assert len(table) == 6
        assert "data.held_out_split=test evaluates on it" in table.report["warnings"][0]
        assert len(prepare(tmp_path, split="test")) == 6
        assert len(prepare(tmp_path, split="all")) == 12
        both = prepare(tmp_path, held_out_split="testing", held_out_share=0.9)
        assert [len(both.split(name)) for name in ("train", "held_out")] == [6, 6]
        assert {record.prompt for record in both.split("train")} == {record.prompt for record in table}
        assert f"data.split=validation: {tmp_path / 'data'} has the splits test, train." in refusal(
            tmp_path, split="validation"
        )
        files = table.report["files"]
        assert files["found"] == files["used"] + sum(files["ignored"].values())
        assert all("split" in reason for reason in files["ignored"])

    def test_the_only_split_is_read_and_of_several_without_train_one_must_be_chosen(self, tmp_path):
        split_folders(tmp_path / "data", ("val",))
        assert len(prepare(tmp_path)) == 6
        split_folders(tmp_path / "data", ("test",))
        assert "has the splits test, validation: choose one with data.split, or data.split=all." in refusal(tmp_path)
        captioned(tmp_path / "data/more/1.png", 99)
        assert [record.prompt for record in prepare(tmp_path)] == ["picture 99"]

    @pytest.mark.parametrize(
        ("path", "split"),
        [
            ("images/val/1.png", "validation"),
            ("train2017/a.jpg", "train"),
            ("data/train-00000-of-00002.parquet", "train"),
            ("annotations/instances_val2017.json", "validation"),
            ("Test/a.png", "test"),
            ("train\\a.png", "train"),
            ("trainstation.parquet", None),
            ("train_val.jsonl", None),
            ("contest/a.csv", None),
            ("testimonials/1.jsonl", None),
        ],
    )
    def test_names_of_splits(self, path, split):
        assert split_in_path(path) == split

    def test_a_held_out_split_shares_neither_prompt_nor_picture_with_training(self, tmp_path):
        data = tmp_path / "data"
        split_folders(data, ("train", "test"))
        (data / "train/0.txt").write_text("PICTURE 10 ")
        Image.open(data / "test/3.png").save(data / "train/copy.bmp")
        (data / "train/copy.txt").write_text("another prompt")
        table = prepare(tmp_path, held_out_split="test")
        assert len(table.split("held_out")) == 6
        assert sorted(record.prompt for record in table.split("train")) == [f"picture {n}" for n in range(1, 6)]
        assert table.report["rejected"]["by_reason"] == {"also_held_out": 2}

    def test_groups_do_not_let_a_held_out_prompt_or_picture_train(self, tmp_path):
        for number, name in enumerate("abc"):
            picture(tmp_path / f"data/{name}.png", colour=colour(number))
        rows = [
            {"prompt": "a cup", "target_image": "a.png", "group": "1", "split": "test"},
            {"prompt": "a tree", "split": "test"},
            {"prompt": "A cup\u200b", "group": "2"},
            {"prompt": "a tree", "group": "3"},
            {"prompt": "a mug", "target_image": "a.png", "group": "4"},
            {"prompt": "a tree", "group": "5"},
            {"prompt": "a hat", "group": "5"},
            {"prompt": "a hat", "target_image": "b.png", "group": "6"},
        ]
        jsonl(tmp_path / "data/list.jsonl", rows)
        assert [r.prompt for r in prepare(tmp_path, held_out_split="test").split("train")] == ["a hat"]
        jsonl(tmp_path / "data/list.jsonl", rows[:-1])
        assert "with data.split. 5 records rejected:" in refusal(tmp_path, held_out_split="test")


@settings(max_examples=8, deadline=None)
@given(pairs=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), st.booleans()), min_size=8, max_size=24))
def test_no_prompt_and_no_picture_is_on_both_sides(tmp_path_factory, pairs):
    """Pictures are equal by what they show: under other names, and in other formats."""
    folder = tmp_path_factory.mktemp("pairs")
    for n, (prompt, shown, is_bmp) in enumerate(pairs):
        path = picture(folder / f"data/{n}{'.bmp' if is_bmp else '.png'}", colour=colour(40 * shown))
        path.with_suffix(".txt").write_text(f"prompt {prompt}")
    for n in range(20):  # So that something is left to train on.
        captioned(folder / f"data/other{n}.png", 1000 + n)
    table = prepare(folder, held_out_share=0.5)
    sides = [
        {
            (kind, value)
            for row in part.rows()
            for kind, value in (("prompt", row["prompt"]), ("", row["target_sha256"]))
        }
        for part in (table.split("held_out"), table.split("train", "eval"))
    ]
    assert not sides[0] & sides[1]
    # The order of the records does not matter.
    again = {row["id"]: row["split"] for row in prepare(folder, held_out_share=0.5).rows()}
    assert again == {row["id"]: row["split"] for row in table.rows()}


class TestColumns:
    def test_every_column_is_listed_and_lists_reach_the_metadata(self, tmp_path):
        row = {"caption": "a cup", "img": embedded(), "thumbnail": embedded(), "include": [{"n": 1}], "raw": b"\0"}
        parquet(tmp_path / "data/train.parquet", [row, {**row, "caption": "two cups"}])
        table = prepare(tmp_path)
        assert table.report["columns"] == {
            "caption": {"prompt": 2},
            "img": {"target": 2},
            "thumbnail": {"ignored": 2},
            "include": {"metadata": 2},
            "raw": {"ignored": 2},
        }
        assert [record.metadata for record in table] == [{"include": [{"n": 1}]}] * 2

    def test_an_ignored_column_is_one_of_the_data(self, tmp_path):
        jsonl(tmp_path / "data/list.jsonl", [{"prompt": "a"}, {"prompt": "b", "thumbnail": "c"}])
        assert len(list(prepare(tmp_path, columns={"ignored": ["thumbnail"]}))) == 2, "one record has it"
        notes = prepare(tmp_path, columns={"ignored": ["thumbnail", "tumbnail"]}).report["warnings"]
        said = "1 column (such as tumbnail) of data.columns.ignored is in no record. Did you mean 'thumbnail'?"
        assert said in notes

    def test_columns_of_rejected_rows_are_listed(self, tmp_path):
        picture(tmp_path / "data/a.png")
        whole = {"prompt": "a", "control_path_0": "a.png", "control_path_1": "a.png", "target": "a.png"}
        jsonl(tmp_path / "data/list.jsonl", [whole, {**whole, "control_path_0": None, "stray": "b"}])
        table = prepare(tmp_path, task="i2i")
        assert table.report["rejected"]["by_reason"] == {"missing_source": 1}
        assert table.report["columns"] == {
            "prompt": {"prompt": 1, "rejected with its row": 1},
            "control_path_0": {"source": 1, "rejected with its row": 1},
            "control_path_1": {"source": 1, "rejected with its row": 1},
            "target": {"target": 1, "rejected with its row": 1},
            "stray": {"rejected with its row": 1},
        }

    @pytest.mark.parametrize(
        ("task", "row", "named"),
        [
            ("t2i", {"prompt": "a", "images": [embedded(), embedded()]}, "data.columns.target=images"),
            ("t2i", {"prompt": "a", "photo": embedded()}, "data.columns.target=photo"),
            ("i2i", {"text": "a", "image": embedded(), "control": embedded()}, "data.columns.source=control"),
            ("mixed", {"text": "a", "image": embedded(), "control": embedded()}, "data.columns.source=control"),
            (
                "t2i",
                {"text": "a", "image": embedded(), "edited_image": embedded()},
                "the column image. Columns found: text (prompt), edited_image (target), image (not used)",
            ),
            ("segmentation", {"query": "a", "image": embedded(), "labels": embedded()}, "data.columns.target=labels"),
        ],
    )
    def test_pictures_that_are_not_used_stop_the_run(self, tmp_path, task, row, named):
        parquet(tmp_path / "data/train.parquet", [row])
        message = refusal(tmp_path, task=task)
        assert named in message
        assert "Columns found:" in message
        assert "t2i" not in message

    def test_columns_by_hand(self, tmp_path):
        row = {"do": "make it red", "one": embedded(colour="blue"), "two": embedded(), "after": embedded(), "x": "y"}
        parquet(tmp_path / "data/train.parquet", [row])
        columns = {"prompt": "do", "source": ["one", "two"], "target": "after", "ignored": "x"}
        (record,) = prepare(tmp_path, task="i2i", columns=columns)
        assert (record.prompt, len(record.source_images), record.metadata) == ("make it red", 2, {})
        assert read_image(record.source_images[0]).getpixel((1, 1)) == (0, 0, 255)
        message = refusal(tmp_path, task="i2i", columns={**columns, "target": "aftr"})
        assert "the column 'aftr' of data.columns does not exist; the columns are do, one, two, after, x" in message
        assert "Did you mean 'after'?" in message
        parquet(tmp_path / "data/train.parquet", [{"prompt": "a", "image": embedded(), "img": embedded(colour="blue")}])
        (record,) = prepare(tmp_path, task="i2i", columns={"source": "image"})
        assert read_image(record.target_image).getpixel((1, 1)) == (0, 0, 255), "one named by hand is nothing else"

    def test_webdataset(self, tmp_path):
        (tmp_path / "data").mkdir()
        keys = [{"k": [1], "id": "a", "group": group} for group in ("b", "b", ["b"])]
        with tarfile.open(tmp_path / "data/train-0.tar", "w") as archive:
            for number, own in enumerate(keys, 1):
                for suffix, content in (
                    ("png", embedded(colour=f"#{number:02x}0000")["bytes"]),
                    ("txt", f"cup {number}".encode()),
                    ("json", json.dumps(own).encode()),
                ):
                    (tmp_path / f"{number}.{suffix}").write_bytes(content)
                    archive.add(tmp_path / f"{number}.{suffix}", f"{number}.{suffix}")
        one, two, three = sorted(prepare(tmp_path), key=lambda record: record.prompt)
        assert (one.prompt, one.metadata) == ("cup 1", {"__key__": "1", "json": keys[0]})
        assert one.split_group == two.split_group != three.split_group
        assert read_image(one.target_image).size == (64, 32)

    def test_nan_is_missing(self, tmp_path):
        rows = [{"prompt": text, "id": value, "group": value} for text, value in (("a", 7.0), ("b", float("nan")))]
        parquet(tmp_path / "data/train.parquet", rows)
        table = prepare(tmp_path)
        assert [record.prompt for record in table] == ["a", "b"]
        assert table.report["columns"]["id"] == {"id": 2}

    def test_names_of_columns_in_capitals(self, tmp_path):
        jsonl(tmp_path / "data/list.jsonl", [{"ID": "7", "Prompt": "a cup", "Group": "g", "Text": "b"}])
        table = prepare(tmp_path)
        assert [(record.id, record.prompt, record.metadata) for record in table] == [("7", "a cup", {"Text": "b"})]
        assert table.report["columns"]["Group"] == {"group": 1}

    def test_urls_and_names_without_a_file_are_metadata(self, tmp_path):
        rows = [{"prompt": "a", "url": "https://example.org/a.png", "taken": "/camera/1.jpg"}]
        jsonl(tmp_path / "data/list.jsonl", rows)
        (record,) = prepare(tmp_path)
        assert record.metadata == {"url": "https://example.org/a.png", "taken": "/camera/1.jpg"}

    def test_a_row_that_names_no_image_is_rejected_where_there_are_images(self, tmp_path):
        picture(tmp_path / "data/a.png")
        rows: list[dict[str, str | None]] = [
            {"file_name": "a.png", "text": "a"},
            {"text": "b"},
            {"file_name": None, "text": "c"},
        ]
        jsonl(tmp_path / "data/metadata.jsonl", rows)
        assert prepare(tmp_path).report["rejected"]["by_reason"] == {"missing_target": 2}
        (tmp_path / "data/a.png").unlink()
        jsonl(tmp_path / "data/metadata.jsonl", [{"text": "b"}])
        assert len(prepare(tmp_path)) == 1


class TestFiles:
    def test_files_used_and_ignored_add_up(self, tmp_path):
        data = tmp_path / "data"
        for n, suffix in enumerate((".txt", ".TXT", ".caption")):
            captioned(data / f"{n}.png", n, suffix)
        picture(data / "without.png")
        picture(data / "both.png").with_suffix(".caption").write_text("other")
        (data / "both.txt").write_text("both")
        (data / "README.md").touch()
        (data / "notes.txt").touch()
        report = prepare(tmp_path).report
        assert report["files"] == {
            "found": 12,
            "used": 9,
            "ignored": {
                ".md, not read as captions": 1,
                ".caption, not read: a .txt of the same name comes first": 1,
                ".txt, not read as captions": 1,
            },
            "listed": ["README.md", "both.caption", "notes.txt"],
        }
        assert report["rejected"]["by_reason"] == {"empty_prompt": 1}

    def test_pictures_that_no_record_uses_are_noted(self, tmp_path):
        picture(tmp_path / "data/photos/0.png")
        jsonl(tmp_path / "data/list.jsonl", [{"prompt": "a", "photo_path": "0.png"}])
        (note,) = prepare(tmp_path).report["warnings"]
        said = "no record has a picture, and the data have 1 picture (such as photos/0.png):"
        assert note.startswith(f"{said} photo_path names some that cannot be read: paths are relative to the")
        (tmp_path / "data/list.jsonl").unlink()
        (tmp_path / "data/prompts.txt").write_text("a cup")
        (note,) = prepare(tmp_path).report["warnings"]
        assert note.endswith("if each has a text of its name, data.layout=captions reads those")

    def test_a_table_beside_its_tar_is_not_read_again(self, tmp_path):
        (tmp_path / "data").mkdir()
        with tarfile.open(tmp_path / "data/00000.tar", "w") as archive:
            (tmp_path / "0.txt").write_text("a cup")
            archive.add(tmp_path / "0.txt", "0.txt")
        parquet(tmp_path / "data/00000.parquet", [{"caption": "a cup"}, {"caption": "not fetched"}])
        assert [record.prompt for record in prepare(tmp_path)] == ["a cup"]

    @pytest.mark.parametrize("task", ["t2i", "i2i", "mixed"])
    def test_masks_are_no_targets_of_edits(self, tmp_path, task):
        picture(tmp_path / "data/images/0.png")
        picture(tmp_path / "data/masks/cup/0.png")
        assert f"are queries about an image with a mask, and data.task is {task}." in refusal(tmp_path, task=task)

    def test_pictures_without_a_row_are_counted(self, tmp_path):
        for name in "abc":
            picture(tmp_path / f"data/{name}.png")
        jsonl(tmp_path / "data/metadata.jsonl", [{"file_name": "a.png", "text": "a"}])
        assert prepare(tmp_path).report["files"]["ignored"] == {"pictures that no record names": 2}

    @settings(max_examples=8, deadline=None)
    @given(name=st.text("aé가ö ñ", min_size=1, max_size=6).map(str.strip).filter(bool), data=st.data())
    def test_names_in_any_unicode_form_and_with_windows_separators(self, tmp_path_factory, name, data):
        folder = tmp_path_factory.mktemp("names")
        forms = st.sampled_from(["NFC", "NFD"])
        on_disk, written = (unicodedata.normalize(data.draw(forms), name) for _ in range(2))
        picture(folder / f"data/in/{on_disk}.png")
        jsonl(folder / "data/metadata.jsonl", [{"file_name": f"in\\{written}.png", "text": "a"}])
        report = prepare(folder).report
        assert report["files"] == {"found": 2, "used": 2, "ignored": {}, "listed": []}

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (
                lambda data: (data / "a.png").write_bytes(POINTER),
                "a.png is a Git LFS pointer, not the image. Fetch the",
            ),
            (lambda data: (data / "a.png").symlink_to("gone/b.png"), "is a link to gone/b.png, which does not exist"),
            (lambda data: (data / "a.png").symlink_to(data), "is not an ordinary file (looked for"),
        ],
    )
    def test_why_a_file_cannot_be_used(self, tmp_path, make, message):
        data = tmp_path / "data"
        data.mkdir()
        make(data)
        jsonl(data / "metadata.jsonl", [{"file_name": "a.png", "text": "a"}])
        assert message in refusal(tmp_path)

    def test_tables_that_git_or_dvc_have_not_fetched(self, tmp_path):
        for name in ("train.parquet", "records.jsonl", "prompts.txt"):
            file = tmp_path / name.partition(".")[0] / name
            file.parent.mkdir()
            file.write_bytes(POINTER)
            assert f"{file} is a Git LFS pointer, not the file." in refusal(tmp_path, path=file.parent)
        picture(tmp_path / "captions/a.png")
        (tmp_path / "captions/a.txt").write_bytes(POINTER)
        assert "the caption a.txt is a Git LFS pointer, not the text" in refusal(tmp_path, path=tmp_path / "captions")
        (tmp_path / "mine.dvc").touch()
        assert "DVC has it in mine.dvc: fetch it with dvc pull." in refusal(tmp_path, path=tmp_path / "mine")
        (tmp_path / "folder").mkdir()
        (tmp_path / "mine.dvc").rename(tmp_path / "folder/mine.dvc")
        assert "DVC tracks data in mine.dvc: fetch them with dvc pull." in refusal(tmp_path, path=tmp_path / "folder")

    def test_edits_in_folders_of_captions_are_those_beside_the_target(self, tmp_path):
        split_folders(tmp_path / "data", ("control", "target"))
        records = prepare(tmp_path, task="i2i")
        assert {record.prompt for record in records} == {f"picture {number}" for number in range(10, 16)}
        assert all(len(record.source_images) == 1 for record in records)


class TestColours:
    @pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
    def test_prepared_pictures_are_in_srgb_without_a_profile(self, tmp_path, mode):
        lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
        srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
        plain = Image.new("RGB", (64, 64), (200, 120, 60)).convert(mode)
        (tmp_path / "data").mkdir()
        for name, profile in (("lab", lab), ("srgb", srgb), ("broken", b"\0" * 200)):
            plain.save(tmp_path / f"data/{name}.png", icc_profile=profile)
            (tmp_path / f"data/{name}.txt").write_text(name)
        expected = np.asarray(plain.convert("RGB"))[9, 9]
        for record in prepare(tmp_path):
            with Image.open(record.target_image) as image:
                assert "icc_profile" not in image.info
                assert (np.asarray(image)[9, 9] == expected).all()

    def test_wide_colours_are_converted(self, tmp_path):
        """The profile's primaries are those of sRGB with red and green swapped: its colours come out swapped."""
        content = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
        names = content[132 : 132 + 12 * int.from_bytes(content[128:132], "big")]
        names = names.replace(b"rXYZ", b"????").replace(b"gXYZ", b"rXYZ").replace(b"????", b"gXYZ")
        content[132 : 132 + len(names)] = names
        swapped = bytes(content).replace("sRGB".encode("utf-16-be"), "xRGB".encode("utf-16-be"))
        image = Image.new("RGB", (64, 64), (200, 120, 60))
        image.save(tmp_path / "a.png", icc_profile=swapped)
        pixel = np.asarray(read_image(tmp_path / "a.png"))[9, 9].astype(int)
        assert np.abs(pixel - (120, 200, 60)).max() <= 1


@given(name=st.text(max_size=12))
def test_a_name_of_a_split_is_one_of_three_or_none(name):
    assert usual_name(name) in {None, "train", "validation", "test"}


def test_comments_and_columns_are_in_the_report_as_json(tmp_path):
    jsonl(tmp_path / "data/list.jsonl", [{"prompt": "a", "score": 1.5}])
    report = prepare(tmp_path).report
    assert json.loads(json.dumps(report)) == report
    assert Preparation(data_config(tmp_path / "data")).source.count() == 1


class TestTexts:
    @pytest.mark.parametrize(
        ("rows", "kept", "lines"),
        [
            (['"hello" on a sign,x', "a cup,z"], ["a cup"], "line 2 is"),
            (['"open quote,y', "a cup,z", 'a "dog",w', "a cat,v"], ["a cat"], "lines 2 to 4 are"),
            (["a cup,z", '"open to the end,y'], ["a cup"], "line 3 is"),
            ([' "a cup, red", z', "a cat, y"], ["a cup, red", "a cat"], None),
            (['a "dog",w', '"a ""quoted"" cup, red",u'], ['a "dog"', 'a "quoted" cup, red'], None),
        ],
    )
    def test_quotes_that_are_no_csv_reject_their_lines_and_no_other(self, tmp_path, rows, kept, lines):
        (tmp_path / "data").mkdir()
        (tmp_path / "data/list.csv").write_text("\n".join(["prompt,note", *rows]))
        table = prepare(tmp_path)
        assert sorted(record.prompt for record in table) == sorted(kept)
        rejected = table.report["rejected"]["listed"]
        assert [one["reason"] for one in rejected] == ["not_csv"] * (lines is not None)
        assert lines is None or rejected[0]["message"].startswith(f"{lines} not valid CSV")

    def test_an_unclosed_quote_takes_no_more_than_a_usual_cell(self, tmp_path):
        (tmp_path / "data").mkdir()
        rows = [f"{'' if number else chr(34)}a cup, number {number}" for number in range(9000)]
        (tmp_path / "data/list.csv").write_text("\n".join(["prompt,note", *rows]))
        assert len(prepare(tmp_path)) > 100

    def test_a_cell_of_several_lines_is_said_and_a_column_twice_is_refused(self, tmp_path):
        (tmp_path / "data").mkdir()
        file = tmp_path / "data/list.csv"
        file.write_text('prompt,note\n"open,y\na cup,x\na screen of 27",z\n' + "a tree,x\n" * 3)
        said = "1 row (such as list.csv, line 4) of several lines: an unclosed quote"
        assert prepare(tmp_path).report["warnings"][0].startswith(said)
        file.write_text("prompt,prompt\na,b\n")
        assert refusal(tmp_path).endswith("the header has 'prompt' more than once. Rename a column.")
        file.write_text("step,reward\n1,0.5\n")
        assert refusal(tmp_path).endswith("If a different file has the prompts, give it as data.path.")
        assert refusal(tmp_path, path=file).endswith("or write a records.jsonl.")

    def test_edits_with_one_picture_are_no_prompts(self, tmp_path):
        picture(tmp_path / "data/0.png")
        jsonl(tmp_path / "data/train.jsonl", [{"image": "0.png", "instruction": "make it blue"}] * 12)
        data = data_config(tmp_path / "data", task="i2i")
        (problem,) = look_at_folder(data, ("t2i", "i2i")).problems
        assert "name its column with data.columns.source=NAME" in str(problem)

    def test_captions_beside_images_to_edit_are_no_prompts_of_targets(self, tmp_path):
        for n in range(3):
            picture(tmp_path / f"data/{n}.png")
            captioned(tmp_path / f"data/source/{n}.png", n)
        data = data_config(tmp_path / "data", task="i2i")
        (problem,) = look_at_folder(data, ("t2i", "i2i")).problems
        said = "0.png: it has no caption; source/0.txt is next to the image to edit, where nothing reads it. Move it to"
        assert f"{said} 0.txt" in str(problem)
        (tmp_path / "data/0.txt").write_text("make it blue")
        ignored = prepare(tmp_path, task="i2i").report["files"]["ignored"]
        assert ignored[".txt next to images to edit, not read: a prompt belongs next to the target"] == 3

    def test_of_two_captions_the_one_that_is_not_read_is_named(self, tmp_path):
        captioned(tmp_path / "data/0.png", 0).with_suffix(".caption").write_text("a caption")
        table = prepare(tmp_path)
        assert table[0].prompt == "picture 0"
        assert table.report["files"]["ignored"] == {".caption, not read: a .txt of the same name comes first": 1}

    def test_what_is_no_prompt_is_said(self, tmp_path):
        picture(tmp_path / "data/0.png").with_suffix(".txt").write_text("0 0.5 0.5 0.1 0.2\n1 0.2 0.2 0.1 0.1")
        captioned(tmp_path / "data/1.png", 1)
        picture(tmp_path / "data/2.png").with_suffix(".txt").write_text('"a cup",')
        assert {*prepare(tmp_path).report["warnings"]} >= {
            "1 prompt (such as 0.png) without a letter: labels for a detector, for example, are not prompts",
            "1 prompt (such as 2.png) entirely in quotes, which count as part of the prompt: remove the quotes of a"
            " list",
        }
        flickr = tmp_path / "data/captions.txt"
        flickr.write_text("image,caption\n0.png,a red square\n0.png,a square\n")
        with pytest.raises(UserError, match=r"captions\.txt, line 2, begins with the name of an image.*metadata\.csv"):
            prepare(tmp_path, path=flickr)

    def test_names_of_classes_come_with_a_saved_dataset(self, tmp_path):
        from datasets import ClassLabel, Dataset, Features, List, Value

        kind = ClassLabel(names=["cat", "dog"])
        objects = List({"kind": kind, "area": Value("int64")})
        features = Features({"prompt": Value("string"), "kind": kind, "kinds": List(kind), "objects": objects})
        row = {"prompt": "a", "kind": 1, "kinds": [0, 1], "objects": [{"kind": 1, "area": 3}]}
        Dataset.from_list([row], features=features).save_to_disk(tmp_path / "data")
        objects = [{"kind": "dog", "area": 3}]
        assert prepare(tmp_path)[0].metadata == {"kind": "dog", "kinds": ["cat", "dog"], "objects": objects}

    @pytest.mark.parametrize(
        ("value", "kept", "became"),
        [
            ("Infinity", None, INFINITE),
            ('{"best": [1, -Infinity]}', {"best": [1, None]}, INFINITE),
            ("NaN", None, EMPTY),
            ('{"best": NaN}', {"best": None}, METADATA),
        ],
    )
    @pytest.mark.parametrize(("name", "lines"), [("records.jsonl", "%s"), ("train.json", "[%s]")])
    def test_numbers_that_json_cannot_hold_are_named(self, tmp_path, value, kept, became, name, lines):
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / name).write_text(lines % f'{{"prompt": "a", "score": {value}}}')
        table = prepare(tmp_path)
        assert table[0].metadata == {"score": kept}
        assert table.report["columns"]["score"] == {became: 1}

    def test_what_json_cannot_hold_is_left_out_of_metadata_and_named(self, tmp_path):
        day = datetime(2026, 1, 2, tzinfo=UTC)
        rows = [{"prompt": "a", "metadata": {"day": day, "raw": b"x"}}, {"prompt": "b", "metadata": {"day": day}}]
        parquet(tmp_path / "data/train.parquet", rows)
        table = prepare(tmp_path)
        assert table[0].metadata == {"day": "2026-01-02 00:00:00+00:00"}
        assert table.report["columns"]["metadata"] == {PARTLY: 1, METADATA: 1}
        jsonl(tmp_path / "data/records.jsonl", ['{"prompt": "a", "metadata": {"score": -Infinity}}'])
        table = prepare(tmp_path)
        assert (table[0].metadata, table.report["columns"]["metadata"]) == ({"score": None}, {INFINITE: 1})

    def test_a_record_twice_is_kept_and_said(self, tmp_path):
        picture(tmp_path / "data/0.png")
        rows = [{"prompt": "a"}, {"prompt": "a", "target_image": "0.png"}, {"prompt": "a", "style": "ink"}]
        jsonl(tmp_path / "data/records.jsonl", rows)
        assert not any("an earlier one" in warning for warning in prepare(tmp_path).report["warnings"])
        jsonl(tmp_path / "data/records.jsonl", [*rows, *rows])
        table = prepare(tmp_path)
        said = "3 records (such as records.jsonl, line 4) repeated: an earlier one is the same"
        assert any(warning.startswith(said) for warning in table.report["warnings"])
        assert len(table) == 6


class TestPicturesOfOtherKinds:
    def test_what_a_crop_takes_and_what_another_trainer_would_do_is_said(self, tmp_path):
        picture(tmp_path / "data/long.png", (600, 40)).with_suffix(".txt").write_text("a long one")
        captioned(tmp_path / "data/reg/1.png", 1)
        assert {*prepare(tmp_path).report["warnings"]} >= {
            "1 picture (such as reg/1.png) meant for regularisation, which is not done: trained on like any other",
            "2 images (such as long.png) of a different shape: more than a third is cropped away",
        }

    def test_pictures_that_only_metadata_name_are_told_from_those_that_nothing_names(self, tmp_path):
        for name in ("a", "hint", "none"):
            picture(tmp_path / f"data/{name}.png", colour=colour(len(name)))
        jsonl(tmp_path / "data/metadata.jsonl", [{"file_name": "a.png", "text": "a", "conditioning_image": "hint.png"}])
        assert prepare(tmp_path).report["files"]["ignored"] == {
            "pictures that only metadata name": 1,
            "pictures that no record names": 1,
        }

    def test_an_archive_and_a_cache_are_named_and_train_is_suggested_first(self, tmp_path):
        captioned(tmp_path / "cache/snapshots/abc/a.png", 1)
        assert "with the files in" in refusal(tmp_path, path=tmp_path / "cache", layout="table")
        for split in ("test", "train"):
            jsonl(tmp_path / f"several/{split}/records.jsonl", [{"prompt": split}])
        assert refusal(tmp_path, path=tmp_path / "several").endswith("several/train")
        (tmp_path / "zips").mkdir()
        (tmp_path / "zips/train.zip").touch()
        assert "An archive is read by itself: data.path=" in refusal(tmp_path, path=tmp_path / "zips")

    def test_the_only_split_is_named_where_it_is_not_train(self, tmp_path):
        jsonl(tmp_path / "data/evaluation_metadata.jsonl", [{"prompt": "a"}])
        assert prepare(tmp_path).report["warnings"] == [
            "the data's only split is test: it is divided like data without splits"
        ]

    def test_the_picture_itself_comes_before_the_name_of_its_file(self, tmp_path):
        rows = [{"image": embedded(colour="blue"), "file_name": "gone.jpg", "text": "a"}]
        parquet(tmp_path / "data/train.parquet", rows)
        assert read_image(prepare(tmp_path)[0].target_image).getpixel((0, 0)) == (0, 0, 255)

    def test_captions_of_coco_are_read_by_their_file_too_and_categories_are_no_captions(self, tmp_path):
        picture(tmp_path / "data/0.png")
        content = {"images": [{"id": 0, "file_name": "0.png"}], "annotations": [{"image_id": 0, "caption": "a"}]}
        file = tmp_path / "data/captions.json"
        file.write_text(json.dumps(content))
        assert [record.prompt for record in prepare(tmp_path, path=file)] == ["a"]
        file.write_text(json.dumps(content | {"annotations": [], "categories": [{"id": 0, "name": "caption"}]}))
        assert "queries about an image with a mask" in refusal(tmp_path)
