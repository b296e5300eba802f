"""Terminal output, on a terminal and in a log."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from contextlib import suppress

import pytest
from rich.console import Console

from visual_grpo.common import console
from visual_grpo.common.quiet_libraries import SafeRecord


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plain() -> tuple[Console, Callable[[], list[str]]]:
    stream = io.StringIO()
    return Console(file=stream, width=120), lambda: stream.getvalue().splitlines()


def test_a_log_gets_a_line_now_and_then_with_the_time_left():
    clock, (target, lines) = Clock(), plain()
    with console.progress("train", 10, console=target, clock=clock, every=15) as bar:
        for _ in range(10):
            clock.now += 6
            bar.advance(reward=0.71234, kl=0.01)
    assert lines() == [
        "train 3/10  reward=0.712 kl=0.01  0:00:42 left",
        "train 6/10  reward=0.712 kl=0.01  0:00:24 left",
        "train 9/10  reward=0.712 kl=0.01  0:00:06 left",
        "train 10/10  reward=0.712 kl=0.01  0:01:00 elapsed",
    ]


def test_a_field_may_change_within_a_step_and_goes():
    clock, (target, lines) = Clock(), plain()
    with console.progress("train", 2, console=target, clock=clock, every=15) as bar:
        for part in ("a", "a", "b"):
            clock.now += 20
            bar.advance(0, now=part)
        bar.advance(now=None)
    assert lines() == [
        "train 0/2  now=a  0:00:20 elapsed",
        "train 0/2  now=b  0:01:00 elapsed",
        "train 1/2  0:01:00 elapsed",
    ]


def test_a_resumed_loop_counts_from_where_it_was_and_times_neither_those_steps_nor_what_precedes_its_own():
    clock, (target, lines) = Clock(), plain()
    with console.progress("train", 10, completed=6, console=target, clock=clock, every=15) as bar:
        clock.now += 100
        bar.advance()
        clock.now += 20
        bar.advance()
    assert lines() == ["train 7/10  0:01:40 elapsed", "train 8/10  0:00:40 left"]


def test_a_bar_below_gets_more_steps_and_another_end():
    clock, (target, lines) = Clock(), plain()
    with console.progress("train", 10, console=target, clock=clock) as bar:
        check = bar.below("check", 2)
        for total in (2, 2, 4):
            clock.now += 6
            check.expect(total)
            check.advance()
        check.print()
        bar.advance()
    assert lines() == ["check 3/4  0:00:18 elapsed", "train 1/10  0:00:18 elapsed"]


def test_a_line_of_another_part_of_the_program_does_not_run_into_the_bar(monkeypatch: pytest.MonkeyPatch):
    stream = io.StringIO()
    monkeypatch.setattr(console, "_console", lambda: Console(file=io.StringIO(), width=120, force_terminal=True))
    with console.progress("train", 10, console=Console(file=stream, width=120, force_terminal=True)) as bar:
        bar.advance(9)
        console.note("MLflow is back")
    lines = [line for line in stream.getvalue().replace("\r", "\n").splitlines() if "MLflow is back" in line]
    assert [line.split("\x1b[2K")[-1] for line in lines] == ["MLflow is back"]


def test_fields_stay_until_they_are_replaced_and_the_last_line_is_printed_when_the_loop_breaks():
    clock, (target, lines) = Clock(), plain()
    with suppress(RuntimeError), console.progress("x", 9, console=target, clock=clock) as bar:
        bar.advance(eval=0.5, reward=1)
        bar.advance(reward=2)
        raise RuntimeError
    assert lines() == ["x 2/9  eval=0.5 reward=2  0:00:00 elapsed"]


def test_a_table_sets_numbers_right_and_keeps_brackets(capsys):
    console.table("T", ["name", "value"], [["a[0]", 1.23456], ["b", 12], ["c", None]])
    out = capsys.readouterr().out
    assert "a[0]" in out
    assert "│  1.23 │" in out
    assert "│    12 │" in out
    assert [console.format_value(value) for value in (-0.0, -0.0004, 0.25)] == ["0", "-0.0004", "0.25"]
    with pytest.raises(ValueError, match="2 columns, but a row of 1"):
        console.table("T", ["a", "b"], [["x"]])


def test_a_table_with_long_cells_is_not_cut_in_a_log(capsys):
    columns = ["colour_entropy", *(f"heading of column {number}" for number in range(8))]
    console.table("T", columns, [["colour_entropy", *["-0.000183"] * 8]])
    rows = capsys.readouterr().out.splitlines()[1:]
    assert {row[-1] for row in rows} <= set("┓┃┩│┘"), "each ends at the right border"
    assert any("colour_entropy" in row for row in rows[3:])


MARKUP = ("[bold]", "\\\\[red]", "[/]", "a[0]", "[link=x]y")


def test_text_is_never_markup(capsys):
    for text in MARKUP:
        console.note(text)
        console.summary(text, {text: text})
        console.table(text, ["a"], [[text]])
        console.heading(text)
    out = capsys.readouterr().out
    assert all(out.count(text) >= 6 for text in MARKUP)


@pytest.mark.parametrize(
    "text", ["\x1b[2Jgone", "\x9b2Jgone", "\rgone", "\x1b]0;title\x07gone", "\u202egone", "\udcffgone"]
)
def test_a_terminal_obeys_nothing_that_data_say(capsys, text):
    shown = io.StringIO()
    target = Console(file=shown, width=120, force_terminal=True, color_system=None)
    with console.progress("train", 1, console=target) as bar:
        bar.note(text)
    console.note(text)
    console.summary("S", {text: text})
    console.table(text, ["a"], [[text]])
    Console(width=120).print(SafeRecord("a", logging.WARNING, "a", 1, "%s", (text,), None).getMessage(), markup=False)
    out = capsys.readouterr().out
    (note,) = [line for line in shown.getvalue().splitlines() if "gone" in line]
    for line in (*out.splitlines(), note.rpartition("\x1b[2K")[2]):
        assert not set(line) & set("\x1b\x9b\r\x07\u202e\udcff")
    first = text[:1].encode("unicode_escape").decode()
    assert out.count(f"{first}") == 6
