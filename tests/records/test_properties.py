"""What holds for every input.

Parsers answer or reject, images go to the prompts of their own lines, splits depend on the record alone.
"""

from __future__ import annotations

import codecs
import csv
import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tests.same_examples  # noqa: F401
from visual_grpo.errors import UserError
from visual_grpo.records.aliases import with_query_names
from visual_grpo.records.control_characters import first_control_character
from visual_grpo.records.coordinates import box_from, points_from
from visual_grpo.records.csv_text import csv_header, csv_rows
from visual_grpo.records.few import is_enough, shares_that_do, split_counts
from visual_grpo.records.ids import with_ids
from visual_grpo.records.layouts.detect import find_records
from visual_grpo.records.layouts.records_jsonl import KEYS
from visual_grpo.records.layouts.solution import solution_of
from visual_grpo.records.raw import Place, RawRecord, Rejected, Rejection
from visual_grpo.records.split import SPLITS, Splitter, held_out_by, prompt_key
from visual_grpo.records.text import Line, count_lines, json_object, read_lines
from visual_grpo.records.validate import check
from visual_grpo.visible_text import visible

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
KEY = st.sampled_from((*KEYS, "query", "image", "mask", "box", "points", "promt")) | st.text(max_size=12)
ROWS = st.dictionaries(KEY, VALUES, max_size=6)
ENCODABLE = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


def written(folder: Path, data: bytes) -> Path:
    (folder / "file").write_bytes(data)
    return folder / "file"


def outcome(function, *arguments):
    """The value or None if it was rejected; any other exception fails."""
    try:
        return function(*arguments)
    except Rejected as error:
        rejected = error
    assert rejected.reason
    assert rejected.message
    assert rejected.remedy
    return None


class TestText:
    @given(data=st.binary(max_size=300) | st.lists(st.binary(max_size=9)).map(b"\n".join), longest=st.integers(1, 40))
    def test_lines_are_the_files_lines_and_never_longer_than_allowed(self, folder, data, longest):
        path = written(folder, data)
        if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            with pytest.raises(UserError, match="UTF-16"):
                list(read_lines(path, longest))
            return
        lines, own = list(read_lines(path, longest)), re.findall(rb"[^\n]*\n|[^\n]+", data)
        assert count_lines(path) == len(lines) == len(own)
        assert [line.number for line in lines] == list(range(1, len(own) + 1))
        assert [line.too_long is None for line in lines] == [len(line) <= longest for line in own]
        for line, expected in zip(lines, own, strict=True):
            text = expected.removeprefix(codecs.BOM_UTF8) if line.number == 1 else expected
            if line.too_long is None:
                assert line.text.encode("utf-8", "surrogateescape") == text

    @given(st.text() | VALUES.map(json.dumps) | ROWS.map(json.dumps))
    def test_a_line_of_json_is_an_object_or_rejected(self, text):
        found = outcome(json_object, Line(1, text, None))
        if found is not None:
            assert isinstance(found, dict)
            assert all(isinstance(key, str) for key in found)

    @given(
        st.dictionaries(st.text(max_size=5), st.text(max_size=5) | st.integers() | st.lists(st.booleans()), max_size=5)
    )
    def test_an_object_is_read_as_it_was_written(self, row):
        assert outcome(json_object, Line(1, json.dumps(row), None)) == row

    @given(depth=st.integers(1, 3000))
    def test_only_objects_that_are_not_too_deep_are_read(self, depth):
        line = '{"a":' * depth + "1" + "}" * depth
        assert (outcome(json_object, Line(1, line, None)) is not None) == (depth <= 100)

    @given(st.binary(max_size=200), st.integers(1, 100))
    def test_a_csv_file_of_any_bytes_is_rows_and_rejections(self, folder, data, longest):
        path = written(folder, b"file_name,text\n" + data)
        lines = count_lines(path)
        for number, row in csv_rows(path, longest + 20):
            assert 1 < number <= lines
            assert isinstance(row, Rejected) or list(row) == ["file_name", "text"]

    @given(st.lists(st.tuples(ENCODABLE, ENCODABLE), max_size=5))
    def test_a_csv_file_gives_the_rows_that_were_written(self, folder, rows):
        with (folder / "file").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerows([("file_name", "text"), *rows])
        assert csv_header(folder / "file", 10_000) == ["file_name", "text"]
        missing = {"", "nan", "null", "none", "n/a", "<na>"}
        expected = [tuple(None if text.strip().lower() in missing else text for text in row) for row in rows]
        found = [tuple(row.values()) for _, row in csv_rows(folder / "file", 10_000) if isinstance(row, dict)]
        assert found == expected

    @given(st.text())
    def test_what_is_shown_has_nothing_that_a_terminal_obeys(self, text):
        shown = visible(text)
        assert first_control_character(shown) is None
        assert not set(shown) & set("\x1b\x9b\r\u202e\u2066")
        assert visible(shown) == shown
        shown.encode()


class TestRecords:
    @given(row=ROWS, task=st.sampled_from(["t2i", "i2i", "mixed", "segmentation"]))
    def test_any_record_is_checked_or_rejected(self, folder, row, task):
        found = outcome(json_object, Line(1, json.dumps(row), None)) or {}
        fields = {key: found.pop(key, None) for key in KEYS}
        raw = RawRecord(
            place=Place("records.jsonl", 1),
            folder=folder,
            source_images=fields.pop("source_image"),
            **fields,
            extra=found,
        )
        (item,) = with_ids(with_query_names([raw]) if task == "segmentation" else [raw])
        if isinstance(item, Rejection):
            return
        checked = outcome(check, item, task)
        if checked is not None:
            assert checked.prompt == checked.prompt.strip() != ""
            assert first_control_character(checked.prompt) is None
            assert isinstance(json.loads(checked.metadata), dict)
            assert checked.target_image is None

    @given(st.sampled_from([key for key in KEYS if key != "id"]), st.data())
    def test_a_key_with_a_letter_too_few_or_too_many_is_no_metadata(self, key, data):
        at = data.draw(st.integers(1, len(key) - 1))
        letter = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz"))
        for wrong in (key[:at] + key[at + 1 :], key[:at] + letter + key[at:], key[:at].upper() + key[at:]):
            raw = RawRecord(
                place=Place("x"), folder=Path(), id=1, prompt=None if key == "prompt" else "a", extra={wrong: 1}
            )
            with pytest.raises(Rejected, match=f"Did you mean '{key}'"):
                check(raw)

    @given(VALUES)
    def test_boxes_and_points_are_finite_or_rejected(self, value):
        box, points = outcome(box_from, value), outcome(points_from, value)
        assert box is None or (all(map(math.isfinite, box)) and box[0] <= box[2] and box[1] <= box[3])
        assert points is None or all(math.isfinite(x) and math.isfinite(y) for x, y in points)

    @given(st.text() | VALUES.map(json.dumps) | st.from_regex(r"<(box|points)>[-().,0-9 e]*</(box|points)>"))
    def test_any_solution_is_read_or_rejected(self, text):
        outcome(solution_of, text)


class TestNumberedPrompts:
    @given(
        lines=st.lists(st.sampled_from(["# note", "prompt"]), min_size=1, max_size=12).filter(lambda x: "prompt" in x),
        numbering=st.sampled_from(["prompts", "lines of prompts", "all lines"]),
        blank=st.sampled_from(["none", "without an image", "with an image"]),
    )
    def test_every_prompt_gets_its_own_image_however_its_owner_has_counted(
        self, tmp_path_factory, lines, numbering, blank
    ):
        folder = tmp_path_factory.mktemp("numbered")
        lines = lines if blank == "none" else [*lines, "", "prompt"]
        prompts = [line for line, text in enumerate(lines) if not text.startswith("#")]
        numbers = {"prompts": range(len(prompts)), "lines of prompts": prompts, "all lines": range(len(lines))}[
            numbering
        ]
        own = (
            {line: n for n, line in enumerate(prompts)} if numbering == "prompts" else {line: line for line in prompts}
        )
        (folder / "target_images").mkdir()
        separators = [own.pop(lines.index(""))] if blank == "without an image" else []
        for number in set(numbers) - set(separators):
            (folder / f"target_images/{number}.png").touch()
        (folder / "prompts.txt").write_text("\n".join(lines) + "\n")
        records = [item for item in find_records(folder).items() if isinstance(item, RawRecord)]
        assert {int(record.place.line or 0) - 1: record.target_image for record in records} == {
            line: f"{number}.png" for line, number in own.items()
        }


class TestSplits:
    @given(ENCODABLE, ENCODABLE, st.floats(0, 0.49), st.floats(0, 0.49), st.floats(0, 0.49))
    def test_a_larger_share_takes_records_and_gives_none_back(self, record_id, prompt, share, held, more):
        first = Splitter(eval_share=share, held_out_share=held)(record_id, held_out_by(prompt))
        assert first in SPLITS
        assert share > 0 or first != "eval"
        assert held > 0 or first != "held_out"
        larger = Splitter(eval_share=share, held_out_share=max(held, more))(record_id, held_out_by(prompt))
        assert first != "held_out" or larger == "held_out"

    @given(st.lists(ENCODABLE, min_size=2), ENCODABLE, st.floats(0, 0.9))
    def test_records_of_one_prompt_or_group_are_held_out_together(self, ids, shared, share):
        split = Splitter(eval_share=0.01, held_out_share=share, sealed_share=min(share, 0.98 - share))
        for key in (held_out_by(shared), held_out_by("other", shared), held_out_by(None, source_sha256=[shared])):
            found = {split(record_id, key) for record_id in ids}
            assert len(found) == 1 or found == {"train", "eval"}

    @given(ENCODABLE, ENCODABLE, *[st.floats(0, 0.24)] * 3, st.floats(0, 0.24))
    def test_the_sealed_share_takes_from_train_and_eval_only_and_gives_none_back(
        self, record_id, prompt, share, held, sealed, more
    ):
        def split(sealed, held=held):
            return Splitter(eval_share=share, held_out_share=held, sealed_share=sealed)(record_id, held_out_by(prompt))

        without, some, most = split(0.0), split(sealed), split(sealed + more)
        assert without == Splitter(eval_share=share, held_out_share=held)(record_id, held_out_by(prompt)) != "sealed"
        assert (without == "held_out") == (some == "held_out") == (most == "held_out")
        assert some != "sealed" or most == "sealed"
        assert some != "sealed" or split(sealed, held + more) == "sealed", "a larger held-out share opens none"
        assert without != "eval" or some in ("eval", "sealed"), "nor does an eval record begin to train"

    @given(
        ENCODABLE,
        st.sampled_from([str.upper, str.lower, lambda text: f"  {text}\n", lambda text: text.replace(" ", "\t")]),
    )
    def test_a_prompt_written_otherwise_in_ascii_is_the_same_prompt(self, text, change):
        plain = text.encode("ascii", "ignore").decode()
        assert prompt_key(change(plain)) == prompt_key(plain)

    @given(
        st.lists(st.tuples(ENCODABLE, ENCODABLE), min_size=2, max_size=8, unique_by=lambda pair: pair[1]),
        st.floats(0, 0.9),
    )
    def test_shares_that_are_proposed_are_enough(self, keys, sealed):
        shares = shares_that_do(keys, (0.1, 0.2, sealed))
        if shares is not None:
            assert sum(shares) < 1
            assert is_enough(split_counts(keys, shares))
