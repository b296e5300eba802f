"""The layouts of data: records, rejections and notes of each, and the messages about other data."""

from __future__ import annotations

import csv
import json
import struct
import zipfile
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset, DatasetDict, Image

from tests.data.folders import FOLDERS
from tests.data.making import data_config, embedded, jsonl, mask, parquet, picture, prepare
from visual_grpo.common.errors import UserError
from visual_grpo.common.images import read_image
from visual_grpo.data import tabular
from visual_grpo.data.archives import unzipped
from visual_grpo.data.record import Note, Place, Record, Rejected
from visual_grpo.data.sources import LAYOUTS, find_records


def read(path, layout="auto", task="t2i", **changes):
    """Records, rejections and notes."""
    items = list(find_records(data_config(path, layout=layout, task=task, **changes)).read())
    return tuple([item for item in items if isinstance(item, kind)] for kind in (Record, Rejected, Note))


def refusal(path, **changes):
    with pytest.raises(UserError) as error:
        list(find_records(data_config(path, **changes)).read())
    return str(error.value)


def builder(table, file="hf://datasets/owner/name@abc/train.parquet"):
    """What `datasets` gives for a dataset of the hub."""
    return SimpleNamespace(
        config=SimpleNamespace(data_files={"train": [file]}),
        download_and_prepare=lambda: None,
        as_dataset=lambda split: DatasetDict({"train": table}),
        hash="abc",
    )


@pytest.fixture
def at_a_commit(monkeypatch):
    info = SimpleNamespace(id="owner/name", sha="abc", gated=False, siblings=[])
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: info)


class TestRecordsJsonl:
    def test_known_keys_are_fields_and_the_others_are_extra(self, tmp_path):
        row = {"prompt": "a cat", "id": 7, "target_image": "a.png", "source_image": ["b.png"], "metadata": {"k": 1}}
        first_line = "\ufeff" + json.dumps(row | {"style": "ink", "image": "c.png"})
        text = [first_line, "", "  ", '{"prompt": "一只猫", "k": NaN}']
        (tmp_path / "records.jsonl").write_text("\r\n".join(text), newline="", encoding="utf-8")
        (first, second), rejections, notes = read(tmp_path)
        assert (first.prompt, first.id, first.target_image, first.source_images) == ("a cat", 7, "a.png", ["b.png"])
        assert (first.metadata, first.extra) == ({"k": 1}, {"style": "ink", "image": "c.png"})
        assert (second.prompt, second.id, second.place.line, second.extra) == ("一只猫", None, 4, {"k": None})
        assert rejections == notes == []

    def test_bad_lines_are_rejected_one_by_one_with_their_number(self, tmp_path):
        lines = ["{prompt: bad}", '["prompt"]', "[" * 100_000, '{"prompt": "last"']
        jsonl(tmp_path / "records.jsonl", ['{"prompt": "good"}', *lines, '{"prompt": "after"}'])
        records, rejections, _ = read(tmp_path)
        assert [record.prompt for record in records] == ["good", "after"]
        assert [(r.reason, r.place.line) for r in rejections] == [("not_json", number) for number in range(2, 6)]
        assert str(rejections[0]).startswith("records.jsonl, line 2: the line is not valid JSON")
        assert "a JSON list, not an object" in str(rejections[1])

    def test_utf16_is_one_clear_error(self, tmp_path):
        (tmp_path / "metadata.csv").write_text("text\na\n", encoding="utf-16")
        assert refusal(tmp_path) == f"{tmp_path / 'metadata.csv'}: this is UTF-16 text. Save the file as UTF-8."


class TestPromptsTxt:
    @pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
    def test_any_line_ending_ends_a_prompt(self, tmp_path, ending):
        text = "".join(f"{text}{ending}" for text in ("一只猫", "# no", "two", ""))
        (tmp_path / "prompts.txt").write_bytes(text.encode())
        records, rejections, notes = read(tmp_path)
        assert [(r.place.line, r.prompt.strip()) for r in records] == [(1, "一只猫"), (3, "two")]
        assert rejections == []
        assert [str(note.place) for note in notes] == ["prompts.txt, line 2"]

    @pytest.mark.parametrize(
        ("numbers", "expected"),
        [((0, 1, 2), {"zero": "0.png", "": "1.png", "two": "2.png"}), ((0, 2), {"zero": "0.png", "two": "2.png"})],
    )
    def test_image_n_belongs_to_line_n(self, tmp_path, numbers, expected):
        (tmp_path / "prompts.txt").write_text("zero\n\ntwo\n")
        for number in numbers:
            picture(tmp_path / f"target_images/{number}.png")
        records, _, notes = read(tmp_path)
        assert {r.prompt.strip(): r.target_image for r in records} == expected
        assert notes == []

    def test_comments_among_numbered_images_and_two_images_of_one_number_are_refused(self, tmp_path):
        (tmp_path / "prompts.txt").write_text("zero\n# one\ntwo\n")
        picture(tmp_path / "target_images/0.png")
        assert f"{tmp_path / 'prompts.txt'}, line 2: lines that begin with #" in refusal(tmp_path)
        picture(tmp_path / "target_images/00.jpg")
        assert "target_images has 0.png and 00.jpg, of one number. Keep one of them." in refusal(tmp_path)

    def test_lists_of_splits_are_read_where_no_pictures_are(self, tmp_path):
        for split in ("train", "test"):
            (tmp_path / f"{split}.txt").write_text(f"{split} zero\nboth\n")
        found = [[(record.id, record.prompt.strip()) for record in read(tmp_path, split=s)[0]] for s in ("all", "test")]
        test, train = [("test-0", "test zero"), ("test-1", "both")], [("train-0", "train zero"), ("train-1", "both")]
        assert found == [test + train, test]
        picture(tmp_path / "images/0.png")  # Other datasets list their pictures in such files.
        assert "test.txt, train.txt: none of these fits" in refusal(tmp_path)

    def test_images_that_seem_to_be_counted_from_1_are_refused(self, tmp_path):
        picture(tmp_path / "target_images/1.png")
        (tmp_path / "prompts.txt").write_text("one\n")
        assert "there is target_images/1.png but no image 0" in refusal(tmp_path)
        (tmp_path / "prompts.txt").write_text("\none\n")
        assert [(r.prompt, r.target_image) for r in read(tmp_path)[0]] == [("one\n", "1.png")]

    def test_missing_and_unused_images_are_told_without_a_shift(self, tmp_path):
        (tmp_path / "prompts.txt").write_text("zero\none\ntwo")
        (tmp_path / "target_images").mkdir()
        for name in ("0.png", "002.webp", ".1.png", "Thumbs.db", "notes.txt", "3.png", "7.png"):
            (tmp_path / "target_images" / name).touch()
        records, rejections, notes = read(tmp_path)
        assert [(r.id, r.target_image) for r in records] == [("0", "0.png"), ("2", "002.webp")]
        assert [(r.id, r.place.line, r.reason) for r in rejections] == [("1", 2, "missing_target")]
        assert [note.place.file for note in notes] == ["target_images/3.png", "target_images/7.png"]


class TestImageFolder:
    def test_jsonl_in_split_folders_with_nested_images(self, tmp_path):
        jsonl(tmp_path / "train/metadata.jsonl", [{"file_name": "a/0.png", "text": "zero", "k": 1}])
        jsonl(tmp_path / "test/metadata.jsonl", [{"file_name": "1.png", "text": "one"}])
        records, rejections, _ = read(tmp_path, split="all")
        assert [(r.prompt, r.folder / r.target_image, dict(r.extra)) for r in records] == [
            ("one", tmp_path / "test/1.png", {"split": "test"}),
            ("zero", tmp_path / "train/a/0.png", {"split": "train", "k": 1}),
        ]
        assert rejections == []

    @pytest.mark.parametrize("key", ["text", "prompt", "caption"])
    def test_csv_with_quotes_line_breaks_and_missing_values(self, tmp_path, key):
        text = (
            f"\ufefffile_name,{key},score,id\r\n"
            '0.png,"a cat, sitting\non a mat",NaN,\r\n'
            "1.png,null,1.5,x\r\n2.png,a dog\r\n3.png,a, b, c, d\r\n\r\n"
        )
        (tmp_path / "metadata.csv").write_text(text, encoding="utf-8", newline="")
        records, rejections, _ = read(tmp_path)
        assert [(r.target_image, r.prompt, r.id, dict(r.extra)) for r in records] == [
            ("0.png", "a cat, sitting\non a mat", None, {"score": None}),
            ("1.png", None, "x", {"score": "1.5"}),
            ("2.png", "a dog", None, {"score": None}),
        ]
        assert [(r.place.line, r.reason) for r in rejections] == [(6, "not_csv")]

    def test_semicolons_and_capitals_of_spreadsheets(self, tmp_path):
        (tmp_path / "metadata.csv").write_text("File_Name;Text;score;tags\n0.png;[a cat, 2];1,5;[1, {}]\n")
        ((record,), _, _) = read(tmp_path)
        assert (record.target_image, record.prompt) == ("0.png", "[a cat, 2]")
        assert dict(record.extra) == {"score": "1,5", "tags": [1, {}]}

    def test_both_kinds_of_metadata_are_refused(self, tmp_path):
        jsonl(tmp_path / "metadata.jsonl", [{"file_name": "0.png", "text": "a"}])
        (tmp_path / "metadata.csv").write_text("file_name,text\n0.png,a cat\n")
        assert "has both metadata.jsonl and metadata.csv" in refusal(tmp_path)


class TestCaptions:
    def test_captions_in_subfolders_and_what_lacks_one(self, tmp_path):
        for name in ("a.png", "a.jpg", "10_cats/b.JPG", "c.png", "d.png", "e.png"):
            picture(tmp_path / name).with_suffix(".txt").write_text(f"caption of {name}")
        (tmp_path / "c.txt").unlink()
        (tmp_path / "d.txt").write_bytes(b"\xff")
        (tmp_path / "e.txt").write_text("e", encoding="utf-16")
        (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
        (tmp_path / "README.txt").touch()
        records, rejections, _ = read(tmp_path)
        assert [(r.target_image, r.prompt) for r in records] == [
            ("a.jpg", "caption of a.jpg"),
            ("a.png", "caption of a.jpg"),
            ("10_cats/b.JPG", "caption of 10_cats/b.JPG"),
        ]
        expected = [("c.png", "empty_prompt"), ("d.png", "unreadable_text"), ("e.png", "unreadable_text")]
        assert [(str(r.place), r.reason) for r in rejections] == expected
        assert rejections[0].remedy == "Write its prompt to c.txt"


PROMPTS = ['she said "hello, you"', "two\nlines", "一只在雪地里的猫, 水墨画"]


class TestTables:
    def test_prompts_in_csv_with_quotes_line_breaks_and_chinese(self, tmp_path):
        for suffix, mark in (("csv", ","), ("tsv", "\t")):
            with (tmp_path / f"list.{suffix}").open("w", newline="", encoding="utf-8") as file:
                csv.writer(file, delimiter=mark).writerows([["prompt", "n"], *([text, "1"] for text in PROMPTS)])
            assert [r.prompt for r in read(tmp_path / f"list.{suffix}")[0]] == PROMPTS

    def test_json_of_several_kinds_of_values(self, tmp_path):
        rows = [{"prompt": text, "k": value} for text, value in zip(PROMPTS, (1, "x", None), strict=True)]
        (tmp_path / "list.json").write_text(json.dumps(rows))
        (tmp_path / "other.json").write_text('{"setting": 1}')
        assert [r.prompt for r in read(tmp_path)[0]] == PROMPTS
        (tmp_path / "list.json").write_text("[1]")
        assert "expected a list of objects" in refusal(tmp_path)

    def test_parquet_with_images_of_the_hub_with_and_without_its_metadata(self, tmp_path):
        rows = [{"image": embedded(colour=colour), "text": colour, "n": n} for n, colour in enumerate(("red", "blue"))]
        parquet(tmp_path / "data/a [1].parquet", rows)
        Dataset.from_list(rows).cast_column("image", Image()).to_parquet(tmp_path / "data/b.parquet")
        for row in rows:
            row["image"] = {"bytes": embedded(colour=str(row["text"]))["bytes"], "width": 48}
        parquet(tmp_path / "data/c.parquet", rows)
        table = prepare(tmp_path)
        assert [record.prompt for record in table] == ["red", "blue"] * 3
        assert [read_image(record.target_image).getpixel((0, 0)) for record in table][1] == (0, 0, 255)
        assert [record.metadata for record in table] == [{"n": 0}, {"n": 1}] * 3
        assert len({record.id for record in table}) == 6

    def test_save_to_disk_and_its_splits(self, tmp_path):
        dataset = Dataset.from_list([{"image": embedded(), "text": text} for text in PROMPTS])
        dataset = dataset.cast_column("image", Image())
        dataset.save_to_disk(tmp_path / "data")
        assert [record.prompt for record in prepare(tmp_path)] == PROMPTS
        assert find_records(data_config(tmp_path / "data")).count() == 3
        DatasetDict({"a": dataset, "b": dataset.select([1])}).save_to_disk(tmp_path / "splits")
        assert refusal(tmp_path / "splits").endswith(
            "has the splits a, b: choose one with data.split, or data.split=all."
        )
        assert len(prepare(tmp_path, path=tmp_path / "splits", split="b")) == 1

    @pytest.mark.parametrize("form", [{"type": "torch", "columns": ["n"]}, {"type": "numpy"}, {"type": "pandas"}])
    def test_a_saved_dataset_is_read_as_without_its_format(self, tmp_path, form):
        rows = [{"id": n, "text": text, "n": n} for n, text in enumerate(PROMPTS)]
        Dataset.from_list(rows).with_format(**form).save_to_disk(tmp_path / "data")
        assert [(r.id, r.prompt, r.metadata) for r in prepare(tmp_path)] == [
            (str(n), text, {"n": n}) for n, text in enumerate(PROMPTS)
        ]

    def test_a_dataset_of_the_hub_names_no_file_of_this_machine(self, monkeypatch, at_a_commit):
        monkeypatch.setattr("datasets.load_dataset_builder", lambda *_, **__: builder(None, "/home/me/diary.txt"))
        assert "it names '/home/me/diary.txt', which is not a file of the hub" in refusal("hf://datasets/owner/name")
        assert "--params=data.path=hf://datasets/owner/name" in refusal(Path("owner/name"))

    def test_a_dataset_of_the_hub_names_no_file_that_was_not_downloaded_for_it(
        self, tmp_path, monkeypatch, at_a_commit
    ):
        cache, downloads = tmp_path / "hub", tmp_path / "datasets/downloads"
        own = [picture(cache / "datasets--owner--name/snapshots/abc/a.png"), picture(downloads / "extracted/b.png")]
        link = cache / "datasets--owner--name/snapshots/abc/link.png"
        link.symlink_to(picture(tmp_path / "private.png"))
        others = [tmp_path / "private.png", picture(cache / "datasets--owner--other/snapshots/abc/a.png"), link]
        rows = [{"image": {"bytes": None, "path": str(file)}, "text": f"{n}"} for n, file in enumerate([*own, *others])]
        table = Dataset.from_list(rows).cast_column("image", Image(decode=False))
        monkeypatch.setattr("datasets.load_dataset_builder", lambda *_, **__: builder(table))
        monkeypatch.setattr("datasets.config.DOWNLOADED_DATASETS_PATH", downloads)
        monkeypatch.setattr(tabular, "HF_HUB_CACHE", str(cache))
        table = prepare(tmp_path, path="hf://datasets/owner/name")
        assert [record.prompt for record in table] == ["0", "1"]
        assert [entry["reason"] for entry in table.report["rejected"]["listed"]] == ["outside_folder"] * 3

    def test_a_saved_dataset_names_no_table_outside_its_folder(self, tmp_path):
        Dataset.from_list([{"text": "my diary"}]).save_to_disk(tmp_path / "private")
        for name in ("data", "linked"):
            Dataset.from_list([{"text": "a"}]).save_to_disk(tmp_path / name)
        DatasetDict({"a": Dataset.from_list([{"text": "a"}])}).save_to_disk(tmp_path / "splits")
        [table] = (tmp_path / "private").glob("*.arrow")
        for state, where in (("data/state.json", str(table)), ("data/state.json", f"../private/{table.name}")):
            tree = json.loads((tmp_path / state).read_text())
            (tmp_path / state).write_text(json.dumps(tree | {"_data_files": [{"filename": where}]}))
            assert "leads outside the data's folder" in refusal(tmp_path / "data")
        [replaced] = (tmp_path / "linked").glob("*.arrow")
        replaced.unlink()
        replaced.symlink_to(table)
        assert "leads outside the data's folder" in refusal(tmp_path / "linked")
        (tmp_path / "splits/dataset_dict.json").write_text('{"splits": ["../private"]}')
        assert "leads outside the data's folder" in refusal(tmp_path / "splits")
        (tmp_path / "splits/dataset_dict.json").write_text("{}")
        assert "cannot be read ('splits')" in refusal(tmp_path / "splits")

    @pytest.mark.parametrize("name", ["a.parquet", "data/a.parquet"])
    def test_a_damaged_table_is_named_with_the_librarys_error(self, tmp_path, name):
        file = parquet(tmp_path / name, [{"image": embedded(), "text": "a"}] * 9)
        file.write_bytes(file.read_bytes()[:-40])
        message = refusal(tmp_path)
        assert str(file) in message
        assert "cannot be read (" in message
        assert len(message.splitlines()) == 1

    @pytest.mark.parametrize(
        ("columns", "suffix"),
        [
            (("source", "instruction", "target"), "csv"),
            (("input_image", "edit_prompt", "edited_image"), "parquet"),
            (("source_image", "prompt", "target_image"), "jsonl"),
        ],
    )
    def test_edits_under_the_names_of_known_datasets(self, tmp_path, columns, suffix):
        names = [picture(tmp_path / f"data/{kind}.png").name for kind in "st"]
        row = dict(zip(columns, (names[0], "make it red", names[1]), strict=True))
        file = tmp_path / f"data/records.{suffix}"
        if suffix == "csv":
            file.write_text("\n".join([",".join(row), ",".join(row.values())]))
        else:
            (jsonl if suffix == "jsonl" else parquet)(file, [row])
        (record,) = prepare(tmp_path, task="i2i")
        assert (record.prompt, len(record.source_images)) == ("make it red", 1)
        assert record.target_image is not None

    def test_a_column_that_only_sounds_like_an_image_is_metadata(self, tmp_path):
        row = {"text": "a cat", "source": "a book", "target": 3}
        jsonl(tmp_path / "records.jsonl", [row])
        ((record,), _, _) = read(tmp_path)
        assert (record.source_images, record.target_image, {"text": "a cat", **record.extra}) == (None, None, row)


class TestMasks:
    def test_folders_of_images_and_masks(self, tmp_path):
        for name in ("a", "b", "c", "d"):
            picture(tmp_path / f"data/images/{name}.jpg", (48, 64))
        mask(tmp_path / "data/masks/left_wing/a.png", (48, 64), (12, 8, 23, 31))
        mask(tmp_path / "data/masks/left_wing/e.png", (48, 64), (12, 8, 23, 31))
        for name in ("b", "c"):
            mask(tmp_path / f"data/masks/{name}.png", (48, 64), (12, 8, 23, 31))
        (tmp_path / "data/images/b.txt").write_text("the beak")
        table = prepare(tmp_path, task="segmentation")
        assert {record.prompt for record in table} == {"left wing", "the beak"}
        assert table[0].metadata["box"] == [16, 4, 31, 15]
        listed = table.report["rejected"]["listed"]
        assert [(entry["file"], entry["reason"], entry["remedy"]) for entry in listed] == [
            ("masks/c.png", "empty_prompt", "Write it to masks/c.txt, or move the mask to masks/THING/c.png"),
            ("masks/left_wing/e.png", "missing_source", "Add images/e.png, or remove the mask"),
        ]
        assert "1 image (such as images/d.jpg) not used: no mask has its name" in table.report["warnings"]

    def test_a_second_image_of_a_masks_name_is_named(self, tmp_path):
        for name in ("a.png", "a.jpg", "b.png"):
            picture(tmp_path / f"data/images/{name}", (48, 64))
        for name in ("a", "b"):
            mask(tmp_path / f"data/masks/wing/{name}.png", (48, 64), (12, 8, 23, 31))
        (note,) = read(tmp_path / "data", task="segmentation")[2]
        assert note == Note("image", "not used: a different image has the same name", Place("images/a.png"))


class TestDetection:
    @pytest.mark.parametrize("kind", ["captions", "image_folder", pytest.param("instructions", marks=pytest.mark.slow)])
    def test_a_zip_is_read_as_its_folder(self, tmp_path, kind, monkeypatch):
        monkeypatch.setattr("datasets.config.EXTRACTED_DATASETS_PATH", str(tmp_path / "cache"))
        FOLDERS[kind](tmp_path / kind)
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
            for file in sorted((tmp_path / kind).rglob("*")):
                name = f"top/{file.relative_to(tmp_path / kind)}"
                archive.write(file, name.replace("/", "\\") if kind == "image_folder" else name)
        task = "i2i" if kind == "instructions" else "t2i"
        digests = {prepare(tmp_path, path=tmp_path / name, task=task).digest for name in (kind, "a.zip")}
        assert len(digests) == 1
        monkeypatch.setenv("HOME", str(tmp_path))
        assert {prepare(tmp_path, path="~/a.zip", task=task).digest} == digests
        (tmp_path / "a.zip").write_bytes(b"PK\3\4nothing")
        assert f"{tmp_path / 'a.zip'} cannot be unpacked" in refusal(tmp_path / "a.zip")

    @pytest.mark.parametrize(
        ("raw", "unicode_path", "name"),
        [
            ("pâté 東京.png".encode(), None, "pâté 東京.png"),
            ("../../é.png".encode(), None, "é.png"),
            ("pâté.png".encode("cp437"), None, "pâté.png"),
            ("Ø.png".encode("cp850"), "Ø.png", "Ø.png"),
            ("Ø.png".encode("cp850"), "of an earlier name.png", "¥.png"),
            ("Ø.png".encode("cp850"), "", "¥.png"),
            ("é\0.png".encode(), None, "é"),
        ],
        ids=["UTF-8", "leads outside", "cp437", "unicode path", "stale unicode path", "empty unicode path", "NUL"],
    )
    def test_names_in_a_zip_that_does_not_say_their_encoding(self, tmp_path, monkeypatch, raw, unicode_path, name):
        monkeypatch.setattr("datasets.config.EXTRACTED_DATASETS_PATH", str(tmp_path / "cache"))
        place, content = b"_" * len(raw), unicode_path.encode() if unicode_path else b""
        entry = zipfile.ZipInfo(place.decode())
        if unicode_path is not None:
            digest = zlib.crc32(raw if unicode_path in (name, "") else b"a different name")
            entry.extra = struct.pack("<HHBL", 0x7075, 5 + len(content), 1, digest) + content
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
            archive.writestr(entry, b"")
        # Python itself would write a name in ASCII, or in UTF-8 with the flag.
        (tmp_path / "a.zip").write_bytes((tmp_path / "a.zip").read_bytes().replace(place, raw))
        folder = unzipped(tmp_path / "a.zip", data_config(tmp_path))
        assert [file.relative_to(folder).as_posix() for file in folder.rglob("*")] == [name]

    def test_a_configured_layout_takes_precedence(self, tmp_path):
        jsonl(tmp_path / "records.jsonl", [{"prompt": "records"}])
        (tmp_path / "prompts.txt").write_text("prompts")
        jsonl(tmp_path / "metadata.jsonl", [{"file_name": "a.png", "text": "image_folder"}])
        picture(tmp_path / "a.png").with_suffix(".txt").write_text("captions")
        assert find_records(data_config(tmp_path)).layout == "records"
        for name in ("records", "prompts", "image_folder", "captions"):
            assert read(tmp_path, name)[0][0].prompt == name

    def test_several_datasets_in_one_folder_are_named(self, tmp_path):
        for kind, make in FOLDERS.items():
            make(tmp_path / kind)
        message = refusal(tmp_path)
        assert "captions (captions), chinese (captions), edits (records), image_folder (image_folder), inst" in message
        assert message.endswith(f"Give one: --params=data.path={tmp_path / 'captions'}")
        (tmp_path / "one/below").mkdir(parents=True)
        jsonl(tmp_path / "one/below/records.jsonl", [{"prompt": "a"}])
        assert f"--params=data.path={tmp_path / 'one/below'}" in refusal(tmp_path / "one")

    @pytest.mark.parametrize(
        ("files", "path", "message"),
        [
            (["a.png", "b.PNG"], ".", "No image has a caption: for a.png there is no a.txt."),
            ([], ".", "which has no files"),
            (["list.doc"], "list.doc", "which has 1 .doc"),
            (["list.doc"], "list.dox", "Did you mean 'list.doc'?"),
        ],
    )
    def test_what_is_no_dataset_gets_one_message(self, tmp_path, files, path, message):
        for name in files:
            (tmp_path / name).touch()
        assert message in refusal(tmp_path / path)

    def test_the_layouts_are_listed_by_the_task(self, tmp_path):
        assert refusal(tmp_path).splitlines()[1].startswith("  records: records.jsonl")
        listed = [line.split(":")[0].strip() for line in refusal(tmp_path, task="segmentation").splitlines()[1:4]]
        assert listed == ["records", "masks", "coco"]
        assert len(refusal(tmp_path).splitlines()) == 1 + len(LAYOUTS)
        assert len(refusal(tmp_path, layout="captions").splitlines()) == 2
        (tmp_path / "a.png").touch()
        assert "caption" not in refusal(tmp_path, task="segmentation").splitlines()[0]

    def test_a_path_that_does_not_exist_has_no_command_that_would_render_other_data(self, tmp_path):
        with pytest.raises(UserError, match="none does not exist") as error:
            find_records(data_config(tmp_path / "none"))
        assert error.value.remedy is None
