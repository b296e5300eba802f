"""The file of choices: appended to, read, and mended without a loss."""

import json
from pathlib import Path

import pytest

from tests.rewards.votes.voters import AT, choice, pair
from visual_grpo.rewards.votes.choices import FIRST, SECOND, SKIP, TIE, UNDO, append_line, read_choices


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
    lines = [choice(pair(1), FIRST).line(), choice(pair(1), SECOND, voter="bo").line()]
    lines += [{"voter": "ann", "choice": UNDO, "pair": name, "at": AT} for name in ("pair1", "pair9")]
    lines += [choice(pair(2), said).line() for said in (FIRST, SKIP)]
    for line in lines:
        append_line(file, line)
    found = [(own.voter, own.of.pair, own.choice) for own in read_choices(file).standing]
    assert found == [("bo", "pair1", SECOND), ("ann", "pair2", SKIP)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"voter": "ann", "cho', "Unterminated string"),
        (b"\xff\xfe", "Expecting value"),
        (b"[1, 2]", "no JSON object"),
        (b'{"voter": "ann", "choice": "first"}', "without pair"),
        (b'{"voter": "ann", "choice": "left", "pair": "pair1"}', "choice is none of"),
        (b'{"voter": 3, "choice": "first", "pair": "pair1"}', "must be texts"),
        (json.dumps(choice(pair(1), FIRST).line() | {"first": 7}).encode(), "first must be a text"),
    ],
)
@pytest.mark.parametrize("end", [b"\n", b""], ids=["whole", "cut off"])
def test_a_damaged_line_is_named_and_the_others_count(file: Path, text: bytes, why: str, end: bytes) -> None:
    append_line(file, choice(pair(1), FIRST).line())
    with file.open("ab") as stream:
        stream.write(text + end)
    append_line(file, choice(pair(2), FIRST).line())
    found = read_choices(file)
    assert [own.of.pair for own in found.standing] == ["pair1", "pair2"]
    (damaged,) = found.damaged
    assert damaged.startswith("line 2 (")
    assert why in damaged
