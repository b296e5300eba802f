"""The file of choices: appended to, read, and mended without a loss."""

import errno
import json
import os
from pathlib import Path

import pytest

from tests.rewards.votes.voters import AT, choice, pair
from visual_grpo.errors import UserError
from visual_grpo.rewards.votes.choices import (
    FIRST,
    SECOND,
    SKIP,
    TIE,
    append_line,
    damaged_file,
    read_choices,
    set_damaged_aside,
    undo_line,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "votes" / "choices.jsonl"


def test_what_is_appended_is_read(file: Path) -> None:
    said = [choice(pair(1), FIRST), choice(pair(2, prompt='a "犬"\n'), TIE), choice(pair(1), SECOND, voter="bo")]
    assert read_choices(file).standing == ()
    for own in said:
        append_line(file, own.line())
    assert list(read_choices(file).standing) == said
    assert [own.preference for own in said] == [1.0, 0.5, 0.0]
    assert choice(pair(1), SKIP).preference is None


def test_the_last_word_of_each_voter_counts_and_can_be_taken_back(file: Path) -> None:
    lines = [
        choice(pair(1), FIRST).line(),
        choice(pair(1), SECOND, voter="bo").line(),
        undo_line("ann", "pair1", AT),
        undo_line("ann", "pair9", AT),
        choice(pair(2), FIRST).line(),
        choice(pair(2), SKIP).line(),
    ]
    for line in lines:
        append_line(file, line)
    assert [(own.voter, own.of.pair, own.choice) for own in read_choices(file).standing] == [
        ("bo", "pair1", SECOND),
        ("ann", "pair2", SKIP),
    ]


DAMAGED = [
    (b'{"voter": "ann", "cho', "no JSON"),
    (b"\xff\xfe", "no JSON"),
    (b"[1, 2]", "no JSON object"),
    (b'{"voter": "ann", "choice": "first"}', "without pair"),
    (b'{"voter": "ann", "choice": "left", "pair": "pair1"}', "choice is none of"),
    (b'{"voter": 3, "choice": "first", "pair": "pair1"}', "must be texts"),
    (json.dumps(choice(pair(1), FIRST).line() | {"first": 7}).encode(), "first must be a text"),
]


@pytest.mark.parametrize(("text", "why"), DAMAGED)
def test_a_damaged_line_is_named_and_the_others_count(file: Path, text: bytes, why: str) -> None:
    append_line(file, choice(pair(1), FIRST).line())
    with file.open("ab") as stream:
        stream.write(text + b"\n")
    append_line(file, choice(pair(2), FIRST).line())
    found = read_choices(file)
    assert [own.of.pair for own in found.standing] == ["pair1", "pair2"]
    (damaged,) = found.damaged
    assert damaged.number == 2
    assert why in str(damaged)


def test_a_half_written_line_is_set_aside_and_not_lost(file: Path) -> None:
    append_line(file, choice(pair(1), FIRST).line())
    whole = file.read_bytes()
    half = b'{"voter": "ann", "choice": "fir'
    file.write_bytes(whole + half)
    (damaged,) = set_damaged_aside(file)
    assert damaged.text == half
    assert file.read_bytes() == whole
    assert damaged_file(file).read_bytes() == half + b"\n"
    append_line(file, choice(pair(2), FIRST).line())
    assert len(read_choices(file).standing) == 2
    assert set_damaged_aside(file) == ()


def test_a_line_that_only_lacks_its_end_is_kept(file: Path) -> None:
    append_line(file, choice(pair(1), FIRST).line())
    file.write_bytes(file.read_bytes().rstrip(b"\n"))
    assert set_damaged_aside(file) == ()
    append_line(file, choice(pair(2), FIRST).line())
    assert len(read_choices(file).standing) == 2
    assert not damaged_file(file).exists()


def test_what_the_disk_has_no_room_for_leaves_no_half_line(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append_line(file, choice(pair(1), FIRST).line())
    before, write = file.read_bytes(), os.write
    parts = iter([10])

    def full(descriptor: int, data: bytes) -> int:
        size = next(parts, None)
        if size is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:size])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            append_line(file, choice(pair(2), FIRST).line())
    assert file.read_bytes() == before


def test_a_folder_in_the_place_of_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_choices(tmp_path)
