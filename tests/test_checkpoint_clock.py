from __future__ import annotations

import pytest

from visual_grpo.checkpoint_clock import CheckpointClock


class Time:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds

    def passes(self, seconds: float) -> None:
        self.seconds += seconds


def test_a_checkpoint_is_due_after_its_minutes_and_within_a_step_that_is_itself_so_long() -> None:
    time = Time()
    clock = CheckpointClock(2, time)
    time.passes(119)
    assert not clock.due()
    clock.step_begins()
    time.passes(1)
    assert clock.due()
    assert not clock.due_within_step()
    time.passes(119)
    assert clock.due_within_step()
    with clock.saving():
        time.passes(7)
    assert not clock.due()
    assert not clock.due_within_step()
    time.passes(120)
    assert clock.due()
    assert clock.due_within_step()


def test_zero_minutes_are_never_due() -> None:
    time = Time()
    clock = CheckpointClock(0, time)
    time.passes(1e9)
    assert not clock.due()
    assert not clock.due_within_step()


def test_the_seconds_of_saving_are_told_once_even_where_it_fails() -> None:
    time = Time()
    clock = CheckpointClock(1, time)

    def save(seconds: float) -> None:
        with clock.saving():
            time.passes(seconds)
            if seconds == 3:
                raise OSError("full")

    with pytest.raises(OSError, match="full"):
        save(3)
    save(4)
    assert clock.take_seconds() == 7
    assert clock.take_seconds() == 0
