"""Commands of a retraining: their exit codes, their time, and what is left of them when they are stopped."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from pathlib import Path

import pytest

from visual_grpo.retraining.commands import Commands
from visual_grpo.retraining.outcome import OutOfTimeError, StageFailedError

PARENT = """
import pathlib, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path("pid").write_text(str(child.pid))
try:
    time.sleep(60)
except KeyboardInterrupt:
    child.wait()
    pathlib.Path("saved").write_text("checkpoint")
"""


def commands(folder: Path, seconds: float | None = None, descriptors: tuple[int, ...] = ()) -> Commands:
    deadline = None if seconds is None else time.monotonic() + seconds
    return Commands(project=folder, deadline=deadline, descriptors=descriptors)


def test_a_failing_command_is_named(tmp_path: Path) -> None:
    with pytest.raises(StageFailedError, match=r"^bash -c exit 3 ended with exit code 3$"):
        commands(tmp_path).run("bash", "-c", "exit 3")
    with pytest.raises(StageFailedError, match=r"ended with exit code 2: no such thing$"):
        commands(tmp_path).output("bash", "-c", "echo no such thing >&2; exit 2")
    assert commands(tmp_path).output("bash", "-c", "pwd").strip() == str(tmp_path)


def test_out_of_time_the_command_and_what_it_started_can_save_and_end(tmp_path: Path) -> None:
    with pytest.raises(OutOfTimeError):
        commands(tmp_path, 3.0).run(sys.executable, "-c", PARENT)
    assert (tmp_path / "saved").read_text() == "checkpoint"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_no_time_left_starts_and_stops_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(OutOfTimeError):
        commands(tmp_path, -1.0).run("sleep", "60")
    assert time.monotonic() - began < 30


def test_a_command_holds_the_lock_that_it_inherits(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        running = commands(tmp_path, descriptors=(file.fileno(),))
        process = running._start(["sleep", "60"])
    with (tmp_path / "lock").open("w") as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        process.kill()
        process.wait()
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
