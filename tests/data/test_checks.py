"""Valid records, and the messages about invalid ones."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.making import data_config, picture
from visual_grpo.common.images import read_image
from visual_grpo.data.checks import checked
from visual_grpo.data.columns import record_from_row
from visual_grpo.data.folders import _read_caption
from visual_grpo.data.image_store import image_digest
from visual_grpo.data.preparation import with_ids
from visual_grpo.data.queries import parse_solution
from visual_grpo.data.record import EmbeddedImage, Limits, Note, Place, Record, Rejected

ANYWHERE = Limits.from_config(data_config(".", allow_outside=True), Path())
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)
KEYS = st.sampled_from(("prompt", "id", "group", "metadata", "image", "mask", "box", "points", "promt", "solution"))


@pytest.fixture
def valid(tmp_path):
    picture(tmp_path / "a.png")
    return Record(place=Place("records.jsonl", 3), folder=tmp_path, id="x", prompt=" a cat\n")


def check(valid, task="mixed"):
    return checked(valid, task, ANYWHERE)


def rejection(valid, task="mixed"):
    with pytest.raises(Rejected) as rejected:
        check(valid, task)
    assert rejected.value.remedy
    return rejected.value


def test_what_nobody_sees_at_the_ends_of_a_prompt_is_removed(valid):
    assert check(replace(valid, prompt="\ufeff a\u200bcat\u200b\n")).prompt == "a\u200bcat"


def test_a_good_record(valid, tmp_path):
    sources = [str(tmp_path / "a.png"), f"../{tmp_path.name}/a.png"]
    fields = {"metadata": {"b": 1}, "extra": {"a": "猫", "b": None}}
    record = check(replace(valid, id=7.0, target_image="a.png", source_images=sources, **fields))
    assert (record.id, record.prompt, record.target_image) == ("7", "a cat", tmp_path / "a.png")
    assert all((tmp_path / "a.png").samefile(str(source)) for source in record.source_images)
    assert json.loads(record.metadata) == {"a": "猫", "b": 1}
    assert check(replace(valid, source_images="a.png")).source_images == (tmp_path / "a.png",)


@contextmanager
def no_more_files() -> Iterator[None]:
    """As at the limit of open files: the system gives each the lowest number that is free."""
    limits, last = resource.getrlimit(resource.RLIMIT_NOFILE), os.open(os.devnull, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(last)


@pytest.mark.parametrize(
    "read",
    [
        lambda folder, valid: read_image(folder / "a.png"),
        lambda folder, valid: image_digest(folder / "a.png"),
        lambda folder, valid: checked(replace(valid, target_image="clip"), "t2i", replace(ANYWHERE, videos=True)),
        lambda folder, valid: _read_caption(folder, "a.txt", ANYWHERE),
    ],
    ids=["picture", "digest", "frames", "caption"],
)
def test_without_a_free_file_no_record_is_rejected(read, valid, tmp_path):
    picture(tmp_path / "clip/0.png")
    (tmp_path / "a.txt").write_text("a cat")
    assert read(tmp_path, valid)
    with no_more_files(), pytest.raises(OSError, match="Too many open files"):
        read(tmp_path, valid)


@pytest.mark.parametrize(
    ("change", "reason", "message"),
    [
        ({"prompt": None, "extra": {"texts": "a"}}, "empty_prompt", "there is no prompt; the record has 'texts'"),
        ({"prompt": " \n"}, "empty_prompt", "the prompt is empty"),
        ({"prompt": "NaN"}, "empty_prompt", "the prompt is empty (NaN)"),
        ({"prompt": "\u200b \ufeff"}, "empty_prompt", "the prompt is empty"),
        ({"prompt": "a" * 20_001}, "prompt_too_long", "the prompt has 20,001 characters, more than 20,000"),
        ({"prompt": 5}, "wrong_type", "prompt must be text, got 5"),
        ({"prompt": ["x" * 1000]}, "wrong_type", "x..."),
        ({"prompt": "a\ud800"}, "not_utf8", "the prompt is not valid UTF-8 at character 2"),
        ({"prompt": "a\0cat"}, "control_character", "the control character U+0000 at character 2"),
        ({"prompt": "a \u202etac"}, "control_character", "U+202E at character 3"),
        ({"id": True}, "wrong_type", "id must be text or a whole number, got True"),
        ({"id": 7.5}, "wrong_type", "id must be text or a whole number, got 7.5"),
        ({"id": " "}, "wrong_type", "id must be text or a whole number, got ' '"),
        ({"target_image": "b.png"}, "missing_target", "target_image 'b.png' does not exist (looked for"),
        ({"target_image": "a\0.png"}, "missing_target", "cannot be opened (embedded null byte)"),
        ({"target_image": "a" * 300}, "missing_target", "cannot be opened (File name too long)"),
        ({"target_image": ""}, "wrong_type", "target_image must be the path of an image, got ''"),
        ({"target_image": ["a.png"]}, "wrong_type", "target_image must be the path of an image, got ['a.png']"),
        ({"source_images": ["a.png", "b.png"]}, "missing_source", "source_image 'b.png' does not exist"),
        ({"source_images": {}}, "wrong_type", "source_image must be the path of an image, got {}"),
        ({"group": ["a"]}, "wrong_type", "group must be text or a whole number, got ['a']"),
        ({"group": "\udcff"}, "not_utf8", "the group is not valid UTF-8 at character 1"),
        ({"metadata": "ink"}, "wrong_type", "metadata must be a JSON object, got 'ink'"),
        (
            {"metadata": {"room": "kitchen", "a": 1}, "extra": {"room": "hall", "a": 1}},
            "ambiguous_key",
            "the record's room is 'hall', and 'kitchen' in its metadata",
        ),
        ({"metadata": {"a": "\udcff"}}, "not_utf8", "the metadata is not valid UTF-8 at"),
        ({"extra": {"target_imge": "a.png"}}, "unknown_key", "'target_imge' is unknown. Did you mean 'target_image'?"),
        ({"extra": {"style": "ink", "Group": "b"}}, "unknown_key", "Did you mean 'group'?"),
        ({"prompt": None, "extra": {"promt": "a"}}, "unknown_key", "'promt' is unknown. Did you mean 'prompt'?"),
        ({"extra": {"targetImage": "a.png"}}, "unknown_key", "Did you mean 'target_image'?"),
    ],
)
def test_rejections(valid, change, reason, message):
    rejected = rejection(replace(valid, **change))
    assert rejected.reason == reason
    assert message in rejected.message
    assert len(rejected.message) < 400


@pytest.mark.parametrize("key", ["prompt_zh", "target_image_2", "idx", "metadata", "_target_image", "#target_image"])
def test_another_name_is_metadata(valid, key):
    assert json.loads(check(replace(valid, extra={key: "x"})).metadata)[key] == "x"


@pytest.mark.parametrize(
    "text", ["one\n\ttwo\r\nthree", "👩‍👩‍👧", "می‌خواهم", "שלום \u200f!", "e\u0301", "a\u00a0b\u2028c", "猫" * 20_000]
)
def test_line_breaks_tabs_emoji_and_every_script_are_text(valid, text):
    assert check(replace(valid, prompt=text)).prompt == text


@pytest.mark.parametrize(
    ("task", "sources", "target", "reason", "message"),
    [
        ("t2i", "a.png", None, "unexpected_source", "data.task to i2i or mixed"),
        ("i2i", None, None, "missing_source", "name its column with data.columns.source"),
        ("i2i", [], None, "missing_source", "Add the image to edit"),
        ("segmentation", None, "a.png", "missing_source", "Name the image that the query asks about"),
        ("segmentation", ["a.png", "a.png"], "a.png", "several_sources", "Name the image that the query asks about"),
        ("segmentation", "a.png", None, "missing_mask", "Name the mask of the queried object"),
        ("segmentation", "b.png", "a.png", "missing_source", "Correct the path"),
        ("t2i", None, None, None, ""),
        ("i2i", ["a.png", "a.png"], None, None, ""),
        ("segmentation", "a.png", "a.png", None, ""),
    ],
)
def test_the_task_decides_which_images_a_record_needs(valid, task, sources, target, reason, message):
    record = replace(valid, source_images=sources, target_image=target)
    if reason is None:
        check(record, task)
        return
    rejected = rejection(record, task)
    assert rejected.reason == reason
    assert message in rejected.remedy


@pytest.mark.parametrize(("key", "meant"), [("boxs", "box"), ("point", "points")])
def test_a_misspelt_box_of_a_query_is_no_metadata(valid, key, meant):
    query = replace(valid, source_images="a.png", target_image="a.png", extra={key: [1, 2, 3, 4]})
    rejected = rejection(query, "segmentation")
    assert f"Did you mean {meant!r}?" in rejected.message
    assert rejected.remedy.endswith(f"or leave it out with data.columns.ignored=[{key}]")


class TestIds:
    def ids(self, *records):
        return [record.id for record in with_ids(iter(records)) if isinstance(record, Record)]

    def record(self, prompt, line=1, file="records.jsonl", **fields):
        return Record(place=Place(file, line), folder=Path(), prompt=prompt, **fields)

    def test_an_id_depends_on_the_records_content_not_its_place(self):
        cat, dog = self.ids(self.record("a cat", 1), self.record("a dog", 2))
        ids = self.ids(self.record("a fish", 1), self.record(" a dog\n", 2), self.record("a cat", 9))
        assert ids == [*self.ids(self.record("a fish")), dog, cat]
        assert cat == "affda15180b5e2a9", "splits of earlier runs depend on it"

    def test_prompt_images_folder_and_repetition_count(self):
        records = [
            self.record("a cat"),
            self.record("a cat"),
            self.record("a cat", target_image="a.png"),
            self.record("a cat", source_images=["a.png"]),
            self.record("a cat", target_image="a.png", file="train/metadata.csv"),
            self.record(3),
            self.record("\udcff"),
        ]
        assert len(set(self.ids(*records))) == 7
        items = [self.record("a cat", id=7), Note("line", "x")]
        assert list(with_ids(iter(items))) == items
        assert (
            str([EmbeddedImage("row 1", b"x")]) == str([EmbeddedImage("row 2", b"x")]) != str([EmbeddedImage("", b"y")])
        )


class TestQueries:
    @pytest.mark.parametrize(("query", "box"), [("prompt", "box"), ("query", "bbox"), ("problem", "box")])
    def test_alternative_names_are_accepted(self, query, box):
        row = {query: "the left wing", "image": "a.png", "mask": "m.png", box: [1, 2, 3, 4], "points": [[1, 2]], "k": 1}
        record = record_from_row(
            row, Place("records.jsonl", 3), Path("data"), data_config(".", task="segmentation"), canonical=True
        )
        assert isinstance(record, Record)
        assert (record.prompt, record.source_images, record.target_image) == ("the left wing", "a.png", "m.png")
        assert record.extra == {"box": [1, 2, 3, 4], "points": [[1, 2]], "k": 1}

    @given(
        row=st.dictionaries(KEYS | st.text(max_size=12), VALUES, max_size=6),
        task=st.sampled_from(["t2i", "segmentation"]),
    )
    def test_any_row_is_read_or_rejected(self, row, task):
        outcome = record_from_row(row, Place("a"), Path(), data_config(".", task=task), canonical=True)
        if isinstance(outcome, Record):
            try:
                check(replace(outcome, id="x"), task)
            except Rejected as rejected:
                outcome = rejected
        if isinstance(outcome, Rejected):
            assert outcome.reason
            assert outcome.message
            assert outcome.remedy


class TestSolutions:
    @pytest.mark.parametrize(
        ("text", "box", "points"),
        [
            ("<box>(12,8),(23,31)</box><points>(14,10),(20,30)</points>", [12, 8, 23, 31], [[14, 10], [20, 30]]),
            (" <box> (1.5, 2) , (3,4) </box>\n", [1.5, 2, 3, 4], None),
            ("<points>(1,2)</points>", None, [[1, 2]]),
            ('[{"bbox_2d": [1, 2, 3, 4], "point_2d": [2, 3]}, {"bbox_2d": [0, 3, 2, 9]}]', [0, 2, 3, 9], [[2, 3]]),
            ('{"bbox_2d": [1, 2, 3, 4]}', [1, 2, 3, 4], None),
            ([{"bbox_2d": [1, 2, 3, 4]}], [1, 2, 3, 4], None),
            ("[]", None, None),
            ("", None, None),
        ],
    )
    def test_seg_zeros_solutions(self, text, box, points):
        assert parse_solution(text) == (box, points)

    def test_invalid_solutions_are_rejected(self):
        tags = ("left", "<box></box", "<box>12,8,23,31</box>", "<box>(1,2),(3,x)</box>", "<box>" * 200_000)
        one_of_two = "<box>1,2,3,4</box><points>(1,2)</points>"
        for text in (*tags, one_of_two, "[1]", "[{}]", "[", 3):
            with pytest.raises(Rejected, match="solution must be "):
                parse_solution(text)
