"""Valid records, and the messages about invalid ones."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from tests.records.making import picture
from visual_grpo.records.raw import Place, RawRecord, Rejected
from visual_grpo.records.validate import check, check_task


@pytest.fixture
def raw(tmp_path):
    picture(tmp_path / "a.png")
    return RawRecord(place=Place("records.jsonl", 3), folder=tmp_path, id="x", prompt=" a cat\n")


def rejection(raw):
    with pytest.raises(Rejected) as rejected:
        check(raw)
    return rejected.value


def test_a_good_record(raw, tmp_path):
    checked = check(
        replace(
            raw,
            id=7,
            target_image="a.png",
            source_images=[str(tmp_path / "a.png"), f"../{tmp_path.name}/a.png"],
            metadata={"b": 1},
            extra={"a": "猫", "b": 2},
        )
    )
    assert (checked.id, checked.prompt, checked.target_image) == ("7", "a cat", tmp_path / "a.png")
    assert len(checked.source_images) == 2
    assert all((tmp_path / "a.png").samefile(str(source)) for source in checked.source_images)
    assert json.loads(checked.metadata) == {"a": "猫", "b": 1}


def test_one_source_image_needs_no_list(raw, tmp_path):
    assert check(replace(raw, source_images="a.png")).source_images == (tmp_path / "a.png",)


def test_a_prompt_of_ten_thousand_characters(raw):
    assert check(replace(raw, prompt="猫" * 20_000)).prompt == "猫" * 20_000


@pytest.mark.parametrize(
    ("change", "reason", "message"),
    [
        (
            {"prompt": None, "extra": {"text": "a"}},
            "empty_prompt",
            "there is no prompt; the record has 'text'",
        ),
        ({"prompt": " \n"}, "empty_prompt", "the prompt is empty"),
        ({"prompt": "a" * 20_001}, "prompt_too_long", "the prompt has 20,001 characters, more than 20,000"),
        ({"prompt": 5}, "wrong_type", "prompt must be text, got 5"),
        ({"prompt": "a\ud800"}, "not_utf8", r"the lone surrogate U+D800 at character 2"),
        ({"id": True}, "wrong_type", "id must be text or a whole number, got True"),
        ({"id": 1.5}, "wrong_type", "id must be text or a whole number, got 1.5"),
        ({"id": " "}, "wrong_type", "the id is empty"),
        ({"target_image": "b.png"}, "missing_target", "target_image 'b.png' does not exist (looked for "),
        ({"target_image": "."}, "missing_target", "does not exist"),
        ({"target_image": "a\0.png"}, "missing_target", "does not exist"),
        ({"target_image": "a" * 300}, "missing_target", "cannot be opened (File name too long)"),
        ({"target_image": ""}, "wrong_type", "target_image must be the path of an image, got ''"),
        ({"target_image": 3}, "wrong_type", "target_image must be the path of an image, got 3"),
        (
            {"target_image": ["a.png"]},
            "wrong_type",
            "target_image must be the path of an image, got ['a.png']",
        ),
        ({"source_images": ["a.png", "b.png"]}, "missing_source", "source_image 'b.png' does not exist"),
        ({"source_images": {}}, "wrong_type", "source_image must be the path of an image, got {}"),
        ({"group": ["a"]}, "wrong_type", "group must be text or a whole number, got ['a']"),
        ({"group": " "}, "wrong_type", "group must be text or a whole number, got ' '"),
        ({"group": "\udcff"}, "not_utf8", "the group is not valid UTF-8: byte 0xFF"),
        ({"metadata": "ink"}, "wrong_type", "metadata must be a JSON object, got 'ink'"),
        ({"metadata": {"a": "\udcff"}}, "not_utf8", "the metadata is not valid UTF-8: byte 0xFF"),
        ({"prompt": ["x" * 1000]}, "wrong_type", "x..."),
    ],
)
def test_rejections(raw, change, reason, message):
    rejected = rejection(replace(raw, **change))
    assert rejected.reason == reason
    assert message in rejected.message
    assert len(rejected.message) < 400


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("~/a.png", "~ is not expanded"),
        ("https://example.com/a.png", "Download the image"),
        ("images\\a.png", "with / instead of \\"),
        ("b.png", "Correct the path or add the file"),
    ],
)
def test_a_missing_image_says_what_to_do(raw, path, remedy):
    assert remedy in rejection(replace(raw, target_image=path)).remedy


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"target_imge": "a.png"}, "there is no field 'target_imge'. Did you mean 'target_image'?"),
        ({"style": "ink", "Group": "b"}, "Did you mean 'group'?"),
        ({"source_images": ["a.png"]}, "Did you mean 'source_image'?"),
        ({"source-image": "a.png"}, "Did you mean 'source_image'?"),
        ({"targetImage": "a.png"}, "Did you mean 'target_image'?"),
        ({"TARGET IMAGE": "a.png"}, "Did you mean 'target_image'?"),
        ({"targetimage": "a.png"}, "Did you mean 'target_image'?"),
        ({"meta_data": {"a": 1}}, "Did you mean 'metadata'?"),
    ],
)
def test_a_misspelt_field_is_refused_and_not_left_out(raw, extra, message):
    with pytest.raises(Rejected, match=re.escape(message)) as rejected:
        check(replace(raw, target_image=None, group=None, source_images=None, extra=extra))
    assert rejected.value.reason == "unknown_key"


def test_a_misspelt_prompt_is_named_before_the_missing_one(raw):
    with pytest.raises(Rejected, match=r"there is no field 'promt'\. Did you mean 'prompt'\?"):
        check(replace(raw, prompt=None, extra={"promt": "a cat"}))


COMMENTED_OUT = ("_target_image", "#target_image", "//target_image")


@pytest.mark.parametrize("key", ["prompt_zh", "prompt-zh", "target_image_2", "idx", "targets", "style", *COMMENTED_OUT])
def test_another_name_is_metadata(raw, key):
    assert json.loads(check(replace(raw, target_image=None, extra={key: "x"})).metadata)[key] == "x"


def test_a_key_beside_the_one_that_it_resembles_is_named(raw):
    checked = check(replace(raw, target_image="a.png", extra={"target_imge": "b.png", "style": "ink"}))
    assert checked.unknown_keys == (("target_imge", " Did you mean 'target_image'?"),)


def test_keys_of_any_length_and_number_take_no_time(raw):
    extra = {"target_imag" + "e" * 1_000_000: 1, **{f"{n} target image": n for n in range(1000)}}
    assert check(replace(raw, extra=extra)).unknown_keys[0][1] == " Did you mean 'target_image'?"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a\0cat", "U+0000 (control character) at character 2"),
        ("\x1b[2Ja cat", "U+001B (control character) at character 1"),
        ("it\x92s a cat", "U+0092 (control character) at character 3"),
        ("a cat\x7f.", "U+007F (control character) at character 6"),
        ("a \u202etac", "U+202E (right-to-left override) at character 3"),
    ],
)
def test_a_prompt_with_a_control_character_is_refused(raw, text, named):
    rejected = rejection(replace(raw, prompt=text))
    assert rejected.reason == "control_character"
    assert rejected.message == f"the prompt has {named}"


@pytest.mark.parametrize(
    "text",
    [
        "one\n\ttwo\r\nthree",
        "👩‍👩‍👧",
        "می‌خواهم",
        "שלום \u200f!",
        "\u2068a\u2069",
        "e\u0301",
        "a\u00a0b\u2028c",
        "🏴\U000e0067\U000e007f",
    ],
)
def test_line_breaks_tabs_emoji_and_every_script_are_text(raw, text):
    assert check(replace(raw, prompt=text)).prompt == text


@pytest.mark.parametrize(
    ("task", "sources", "reason", "remedy"),
    [
        ("t2i", "a.png", "unexpected_source", "data.task to i2i or mixed"),
        ("i2i", None, "missing_source", "data.task to mixed or t2i"),
        ("i2i", [], "missing_source", "Add the image to edit"),
    ],
)
def test_a_record_of_the_other_task_is_rejected_by_the_key(raw, task, sources, reason, remedy):
    with pytest.raises(Rejected, match=r"source_image.*data\.task is ") as rejected:
        check_task(check(replace(raw, source_images=sources)), task)
    assert rejected.value.reason == reason
    assert remedy in rejected.value.remedy


@pytest.mark.parametrize(
    ("sources", "target", "reason"),
    [
        (None, "a.png", "missing_source"),
        (["a.png", "a.png"], "a.png", "several_sources"),
        ("a.png", None, "missing_mask"),
    ],
)
def test_a_query_needs_one_image_and_a_mask(raw, sources, target, reason):
    record = check(replace(raw, source_images=sources, target_image=target), "segmentation")
    with pytest.raises(Rejected, match=r"data\.task is segmentation") as rejected:
        check_task(record, "segmentation")
    assert rejected.value.reason == reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": None}, "there is no query"),
        ({"source_images": "b.png"}, "image 'b.png' does not exist"),
        ({"target_image": "b.png"}, "mask 'b.png' does not exist"),
    ],
)
def test_messages_about_queries_use_their_key_names(raw, change, message):
    with pytest.raises(Rejected, match=message):
        check(replace(raw, **change), "segmentation")


@pytest.mark.parametrize(
    ("task", "sources"), [("t2i", None), ("i2i", ["a.png", "a.png"]), ("mixed", None), ("mixed", "a.png")]
)
def test_a_record_of_the_task_is_accepted(raw, task, sources):
    check_task(check(replace(raw, source_images=sources)), task)
