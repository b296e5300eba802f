"""The layouts of prompts and images."""

from __future__ import annotations

import json

import pytest

from tests.records.making import jsonl, picture
from visual_grpo import command
from visual_grpo.command import Command
from visual_grpo.errors import UserError
from visual_grpo.records.layouts.detect import find_records
from visual_grpo.records.raw import Note, RawRecord, Rejection
from visual_grpo.records.text import read_lines


def read(path, layout="auto"):
    items = list(find_records(path, layout).items())
    return (
        [item for item in items if isinstance(item, RawRecord)],
        [item for item in items if isinstance(item, Rejection)],
        [item.text for item in items if isinstance(item, Note)],
    )


class TestRecordsJsonl:
    def test_known_keys_are_fields_and_the_others_are_extra(self, tmp_path):
        row = {
            "prompt": "a cat",
            "id": 7,
            "target_image": "a.png",
            "source_image": ["b.png"],
            "metadata": {"k": 1},
            "style": "ink",
        }
        jsonl(tmp_path / "records.jsonl", [row, "", "  ", {"prompt": "a dog"}])
        records, rejections, notes = read(tmp_path)
        first, second = records
        assert (
            first.prompt,
            first.id,
            first.target_image,
            first.source_images,
            first.metadata,
            first.extra,
        ) == (
            "a cat",
            7,
            "a.png",
            ["b.png"],
            {"k": 1},
            {"style": "ink"},
        )
        assert (second.prompt, second.id, second.target_image, second.place.line) == ("a dog", None, None, 4)
        assert rejections == notes == []

    def test_byte_order_mark_crlf_and_chinese(self, tmp_path):
        text = '{"prompt": "一只猫"}\r\n{"prompt": "a dog"}\r\n'
        (tmp_path / "records.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
        records, rejections, _ = read(tmp_path)
        assert [record.prompt for record in records] == ["一只猫", "a dog"]
        assert rejections == []

    def test_bad_lines_are_rejected_one_by_one_with_their_number(self, tmp_path):
        lines = [
            b'{"prompt": "good"}',
            b"{prompt: bad}",
            b'["prompt"]',
            '{"prompt": "红色"}'.encode("gbk"),
            b'{"prompt": "x", "score": Infinity}',
            b"[" * 100_000,
            b'{"prompt": "last"',
        ]
        (tmp_path / "records.jsonl").write_bytes(b"\n".join(lines))
        records, rejections, _ = read(tmp_path)
        assert [record.prompt for record in records] == ["good"]
        assert [(r.place.line, r.reason) for r in rejections] == [
            (2, "not_json"),
            (3, "not_json"),
            (4, "not_utf8"),
            (5, "not_json"),
            (6, "not_json"),
            (7, "not_json"),
        ]
        assert "byte 0xBA at character 13" in rejections[2].message
        assert str(rejections[2]).startswith("records.jsonl, line 4: ")

    @pytest.mark.parametrize(
        "line", ['{"prompt": "a", "prompt": "b"}', '{"prompt": "a", "tags": {"prompt": 1, "prompt": 1}}']
    )
    def test_a_key_that_is_there_twice_is_rejected(self, tmp_path, line):
        (tmp_path / "records.jsonl").write_text(f'{line}\n{{"prompt": "c"}}\n')
        records, (rejection,), _ = read(tmp_path)
        assert [record.prompt for record in records] == ["c"]
        assert (rejection.reason, rejection.place.line) == ("repeated_key", 1)
        assert "the key 'prompt' is there twice" in str(rejection)

    def test_nan_is_null(self, tmp_path):
        jsonl(tmp_path / "records.jsonl", ['{"prompt": NaN, "score": NaN}'])
        (record,), _, _ = read(tmp_path)
        assert record.prompt is None
        assert record.extra == {"score": None}

    def test_utf16_is_one_clear_error(self, tmp_path):
        (tmp_path / "records.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-16")
        with pytest.raises(UserError, match=r"records.jsonl: this is UTF-16 text. Save the file as UTF-8."):
            read(tmp_path)


class TestPromptsTxt:
    @pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
    def test_any_line_ending_ends_a_prompt(self, tmp_path, ending):
        (tmp_path / "prompts.txt").write_bytes(
            "".join(f"{text}{ending}" for text in ("一只猫", "# no", "two", "")).encode()
        )
        records, rejections, notes = read(tmp_path)
        assert [(r.place.line, r.prompt.rstrip()) for r in records] == [(1, "一只猫"), (3, "two")]
        assert rejections == notes == []
        assert find_records(tmp_path).count() == 2, "what the progress bar ends with"

    def test_a_line_that_is_too_long_is_skipped_up_to_its_ending(self, tmp_path):
        for ending in ("\n", "\r"):
            (tmp_path / "prompts.txt").write_text(f"one{ending}{'x' * 3000}{ending}three", newline="")
            lines = list(read_lines(tmp_path / "prompts.txt", 10))
            assert [line.too_long is None for line in lines] == [True, False, True]
            assert (lines[0].text, lines[2].text) == (f"one{ending}", "three")

    def test_the_nth_line_that_is_not_a_comment_has_the_nth_image(self, tmp_path):
        (tmp_path / "prompts.txt").write_text("# mine\nzero\n\n # between\ntwo\n")
        for name in ("0.png", "1.png", "2.JPG"):
            picture(tmp_path / "target_images" / name)
        records, rejections, notes = read(tmp_path)
        assert [(r.id, r.prompt.strip(), r.target_image) for r in records] == [
            ("0", "zero", "0.png"),
            ("1", "", "1.png"),
            ("2", "two", "2.JPG"),
        ]
        assert [record.place.line for record in records] == [2, 3, 5]
        assert rejections == notes == []

    @pytest.mark.parametrize(
        ("numbers", "expected", "noted"),
        [
            ((0, 1, 2), {"zero": "0.png", "one": "1.png", "two": "2.png"}, False),
            ((0, 2, 4), {"zero": "0.png", "one": "2.png", "two": "4.png"}, True),
            ((0, 1, 2, 3, 4), {"zero": "0.png", "one": "2.png", "two": "4.png"}, True),
            ((0, 1), {"zero": "0.png", "one": "1.png"}, False),
        ],
    )
    def test_a_comment_gives_no_prompt_the_image_of_another(self, tmp_path, numbers, expected, noted):
        (tmp_path / "prompts.txt").write_text("zero\n# between\none\n# and\ntwo\n")
        for number in numbers:
            picture(tmp_path / "target_images" / f"{number}.png")
        records, rejections, notes = read(tmp_path)
        assert {r.prompt.strip(): r.target_image for r in records} == expected
        assert len(records) + len(rejections) == 3
        assert any("begin with # are comments" in note for note in notes) == noted

    def test_comments_and_missing_images_that_can_be_read_in_two_ways_are_refused(self, tmp_path):
        (tmp_path / "prompts.txt").write_text("zero\n# between\none\n# and\ntwo\n")
        for number in (0, 2):
            picture(tmp_path / "target_images" / f"{number}.png")
        with pytest.raises(UserError, match=r"1 images missing in target_images.*which image is of which line"):
            read(tmp_path)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("# mine\nzero\none\ntwo\n", {"zero": "0.png", "one": "1.png", "two": "2.png"}),
            ("zero\n\n# mine\ntwo\n", {"zero": "0.png", "": "1.png", "two": "2.png"}),
            ("zero\n# one\ntwo\n", {"zero": "0.png", "two": "2.png"}),
            ("# zero\none\ntwo\n", {"one": "1.png", "two": "2.png"}),
            ("zero\n\ntwo\n", {"zero": "0.png", "": "1.png", "two": "2.png"}),
        ],
    )
    def test_a_comment_that_is_added_and_a_prompt_that_is_commented_out_shift_nothing(self, tmp_path, text, expected):
        (tmp_path / "prompts.txt").write_text(text)
        for number in range(3):
            picture(tmp_path / "target_images" / f"{number}.png")
        records, _, _ = read(tmp_path)
        assert {r.prompt.strip(): r.target_image for r in records} == expected

    @pytest.mark.parametrize(
        ("text", "numbers", "expected"),
        [
            ("zero\n\n \t\nthree\n\n", (), {"zero": None, "three": None}),
            ("zero\n\ntwo\n\n", (0, 2), {"zero": "0.png", "two": "2.png"}),
            ("zero\n\ntwo\n# mine\n", (0, 2), {"zero": "0.png", "two": "2.png"}),
            ("# mine\nzero\n\ntwo\n", (1, 3), {"zero": "1.png", "two": "3.png"}),
        ],
    )
    def test_a_blank_line_separates_prompts_and_is_counted(self, tmp_path, text, numbers, expected):
        (tmp_path / "prompts.txt").write_text(text)
        for number in numbers:
            picture(tmp_path / "target_images" / f"{number}.png")
        records, rejections, _ = read(tmp_path)
        assert {r.prompt.strip(): r.target_image for r in records} == expected
        assert [int(r.id) for r in records] == [
            int((r.target_image or f"{r.place.line - 1}.").split(".")[0]) for r in records
        ]
        assert rejections == []

    def test_a_headline_and_a_prompt_that_is_commented_out_are_not_guessed_apart(self, tmp_path):
        (tmp_path / "prompts.txt").write_text("# mine\nzero\n# one\ntwo\n")
        for number in range(3):
            picture(tmp_path / "target_images" / f"{number}.png")
        with pytest.raises(UserError, match="1 more images than prompts in target_images, it cannot be told"):
            read(tmp_path)

    def test_missing_and_ambiguous_targets_are_rejected_without_a_shift(self, tmp_path):
        (tmp_path / "prompts.txt").write_text("zero\none\ntwo")
        for name in ("0.png", "0.jpg", "002.webp", ".1.png", "Thumbs.db", "notes.txt"):
            (tmp_path / "target_images").mkdir(exist_ok=True)
            (tmp_path / "target_images" / name).touch()
        records, rejections, _ = read(tmp_path)
        assert [(r.id, r.target_image) for r in records] == [("2", "002.webp")]
        assert [(r.id, r.place.line, r.reason) for r in rejections] == [
            ("0", 1, "ambiguous_target"),
            ("1", 2, "missing_target"),
        ]

    def test_images_past_the_last_prompt_are_noted(self, tmp_path):
        (tmp_path / "prompts.txt").write_text("zero\n")
        for number in range(3):
            picture(tmp_path / "target_images" / f"{number}.png")
        _, _, (note,) = read(tmp_path)
        assert note.startswith("2 images in target_images have a number of 1 or more")

    def test_without_images_prompts_have_no_target(self, tmp_path):
        (tmp_path / "prompts.txt").write_text("zero\none\n")
        records, rejections, _ = read(tmp_path)
        assert [record.target_image for record in records] == [None, None]
        assert rejections == []


class TestImageFolder:
    def test_jsonl_in_split_folders_with_nested_images(self, tmp_path):
        jsonl(tmp_path / "train/metadata.jsonl", [{"file_name": "a/0.png", "text": "zero", "k": 1}])
        jsonl(tmp_path / "test/metadata.jsonl", [{"file_name": "1.png", "text": "one"}])
        records, rejections, (note,) = read(tmp_path)
        assert [(r.prompt, r.folder / r.target_image, dict(r.extra)) for r in records] == [
            ("one", tmp_path / "test/1.png", {"split": "test"}),
            ("zero", tmp_path / "train/a/0.png", {"split": "train", "k": 1}),
        ]
        assert "test, train" in note
        assert rejections == []

    def test_csv_with_quotes_line_breaks_and_missing_values(self, tmp_path):
        text = (
            "\ufefffile_name,text,score,id\r\n"
            '0.png,"a cat, sitting\non a mat",NaN,\r\n'
            "1.png,null,1.5,x\r\n"
            "2.png,a dog\r\n"
            "3.png,a, b, c, d\r\n"
            "\r\n"
            ",no file,,\r\n"
        )
        (tmp_path / "metadata.csv").write_text(text, encoding="utf-8", newline="")
        records, rejections, _ = read(tmp_path)
        assert [(r.target_image, r.prompt, r.id, dict(r.extra)) for r in records] == [
            ("0.png", "a cat, sitting\non a mat", None, {"score": None}),
            ("1.png", None, "x", {"score": "1.5"}),
            ("2.png", "a dog", None, {"score": None}),
        ]
        assert [(r.place.line, r.reason) for r in rejections] == [(6, "not_csv"), (8, "missing_target")]

    @pytest.mark.parametrize("key", ["text", "prompt", "caption"])
    def test_the_text_may_be_called_prompt_or_caption(self, tmp_path, key):
        (tmp_path / "metadata.csv").write_text(f"file_name,{key}\n0.png,a cat\n")
        (record,), _, _ = read(tmp_path)
        assert record.prompt == "a cat"
        assert record.extra == {}

    def test_a_header_with_semicolons_is_refused(self, tmp_path):
        (tmp_path / "metadata.csv").write_text("file_name;text\n0.png;a cat\n")
        with pytest.raises(UserError, match="separated by commas; it is"):
            read(tmp_path)

    def test_two_kinds_of_metadata_in_a_folder_are_refused(self, tmp_path):
        jsonl(tmp_path / "metadata.jsonl", [])
        (tmp_path / "metadata.csv").write_text("file_name,text\n")
        with pytest.raises(UserError, match="Keep one of them"):
            read(tmp_path)


class TestCaptions:
    def test_images_in_folders_with_odd_names(self, tmp_path):
        folder = tmp_path / "my photos 照片"
        for name, caption in [("b.JPG", "a bee\n"), ("deep er/猫.webp", "一只猫"), ("a.tar.png", "a tar")]:
            path = picture(folder / name)
            path.with_suffix(".txt").write_text(caption, encoding="utf-8")
        for name in (".hidden.png", "Thumbs.db", ".DS_Store", "__MACOSX/x.png"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).touch()
        records, rejections, notes = read(folder)
        assert [(r.target_image, r.prompt.strip(), r.folder) for r in records] == [
            ("a.tar.png", "a tar", folder),
            ("b.JPG", "a bee", folder),
            ("deep er/猫.webp", "一只猫", folder),
        ]
        assert rejections == notes == []

    def test_an_image_without_caption_is_rejected_and_a_text_without_image_noted(self, tmp_path):
        picture(tmp_path / "a.png").with_suffix(".txt").write_text("a cat")
        picture(tmp_path / "b.png")
        (tmp_path / "c.txt").write_bytes("红色".encode("gbk"))
        picture(tmp_path / "c.png")
        picture(tmp_path / "d.png").with_suffix(".txt").write_text("a dog", encoding="utf-16")
        for number in range(7):
            (tmp_path / f"README{number}.txt").touch()
        records, rejections, (note,) = read(tmp_path)
        assert [record.target_image for record in records] == ["a.png"]
        assert [(str(r.place), r.reason) for r in rejections] == [
            ("b.png", "empty_prompt"),
            ("c.png", "not_utf8"),
            ("d.png", "not_utf8"),
        ]
        assert rejections[0].remedy == "Write its prompt to b.txt"
        assert rejections[2].message == "d.txt is UTF-16 text"
        assert note.endswith("README0.txt, README1.txt, README2.txt, README3.txt, README4.txt and 2 more")

    def test_files_of_other_kinds_are_noted(self, tmp_path):
        picture(tmp_path / "a.png").with_suffix(".txt").write_text("a cat")
        (tmp_path / "a.json").touch()
        for number in range(6):
            (tmp_path / f"page{number}.pdf").touch()
        records, rejections, (note,) = read(tmp_path)
        assert ([record.target_image for record in records], rejections) == (["a.png"], [])
        assert note == (
            "files that are neither images nor captions were ignored:"
            " a.json, page0.pdf, page1.pdf, page2.pdf, page3.pdf and 2 more"
        )

    def test_two_images_may_share_a_caption(self, tmp_path):
        picture(tmp_path / "a.png").with_suffix(".txt").write_text("a cat")
        picture(tmp_path / "a.jpg")
        records, _, _ = read(tmp_path)
        assert [(r.target_image, r.prompt) for r in records] == [("a.jpg", "a cat"), ("a.png", "a cat")]

    def test_a_folder_that_links_to_itself_is_read_once(self, tmp_path):
        picture(tmp_path / "a.png").with_suffix(".txt").write_text("a cat")
        (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
        records, _, _ = read(tmp_path)
        assert [record.target_image for record in records] == ["a.png"]


class TestDetection:
    def make(self, folder, name):
        if name == "records":
            return jsonl(folder / "records.jsonl", [{"prompt": "records"}])
        if name == "prompts":
            folder.mkdir(exist_ok=True)
            (folder / "prompts.txt").write_text("prompts")
            return folder / "prompts.txt"
        if name == "image_folder":
            row = {"file_name": "a.png", "text": "image_folder"}
            return jsonl(folder / "metadata.jsonl", [row])
        picture(folder / "a.png").with_suffix(".txt").write_text("captions")
        return folder

    @pytest.mark.parametrize("name", ["records", "prompts", "image_folder", "captions"])
    def test_auto_finds_a_layout_by_its_folder_or_file(self, tmp_path, name):
        file = self.make(tmp_path / "data", name)
        for path in (tmp_path / "data", file):
            assert find_records(path).layout.name == name

    def test_a_configured_layout_takes_precedence(self, tmp_path):
        for name in ("records", "prompts", "image_folder", "captions"):
            self.make(tmp_path, name)
        assert find_records(tmp_path).layout.name == "records"
        for name in ("records", "prompts", "image_folder", "captions"):
            assert read(tmp_path, name)[0][0].prompt == name

    def test_without_a_fitting_layout_the_error_lists_what_was_looked_for(self, tmp_path):
        picture(tmp_path / "a.png")
        with pytest.raises(UserError) as error:
            find_records(tmp_path)
        for name in ("records.jsonl", "prompts.txt", "metadata.csv", "cat.jpg with cat.txt"):
            assert name in str(error.value)
        with pytest.raises(UserError) as error:
            find_records(tmp_path, "prompts")
        assert "metadata.csv" not in str(error.value)

    def test_a_path_that_does_not_exist_names_the_parameter_and_the_command_that_draws(self, tmp_path, monkeypatch):
        running = Command(None, ("--pipeline=data_preparation",), {"data.path": "none", "seed": 3})
        monkeypatch.setattr(command, "_running", [running])
        with pytest.raises(UserError, match=r"--params=data\.path=FOLDER") as refusal:
            find_records(tmp_path / "none")
        drawing = Command(None, ("--pipeline=starter",), {"seed": 3})
        assert str(refusal.value).splitlines()[-1] == str(drawing)

    def test_counts_for_the_progress_bar(self, tmp_path):
        (tmp_path / "metadata.csv").write_text("file_name,text\n0.png,a\n1.png,b\n")
        assert find_records(tmp_path).count() == 2
        jsonl(tmp_path / "records.jsonl", [json.loads('{"prompt": "a"}')] * 3)
        assert find_records(tmp_path).count() == 3


class TestNothingFound:
    def message(self, path, layout="auto"):
        with pytest.raises(UserError) as refusal:
            find_records(path, layout)
        return str(refusal.value)

    def test_every_layout_says_what_was_missing(self, tmp_path):
        for name in ("prompt.txt", "a/records.jsonl", "cat.jpg", "dog.PNG", "table.csv"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        lines = self.message(tmp_path).splitlines()
        assert lines[0] == (
            f"data.path: no records found in {tmp_path}, which has 1 .jsonl, 1 .jpg, 1 .png, 1 .txt, 1 .csv."
            " Looked for, and missing:"
        )
        missing = {line.split(":")[0].strip(): line.rpartition("; ")[2] for line in lines[1:]}
        assert missing == {
            "records": f"there is no records.jsonl but a/records.jsonl: give data.path={tmp_path / 'a'}",
            "prompts": "there is no prompts.txt but prompt.txt: rename it, or give it as data.path",
            "image_folder": "there is no metadata.jsonl and there is no metadata.csv",
            "captions": "2 images, none with a caption: for cat.jpg there is no cat.txt",
            "seg_zero": "there is no *.parquet, neither directly nor in data",
        }

    def test_an_empty_folder_a_file_and_a_misspelt_path(self, tmp_path):
        (tmp_path / "photos").mkdir()
        assert "which has no files" in self.message(tmp_path / "photos")
        assert "captions: " in self.message(tmp_path / "photos", "captions")
        assert "prompts: " not in self.message(tmp_path / "photos", "captions")
        (tmp_path / "list.doc").touch()
        assert "which is a file" in self.message(tmp_path / "list.doc")
        assert "Did you mean 'photos'?" in self.message(tmp_path / "photo")

    def test_a_table_of_other_columns_is_shown(self, tmp_path):
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"question": ["a"], "answer": ["b"]}), tmp_path / "a.parquet")
        assert "a.parquet has the columns question, answer" in self.message(tmp_path)
