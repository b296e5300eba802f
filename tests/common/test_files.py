"""What is written whole or not at all, by one command at a time."""

from __future__ import annotations

import csv
import errno
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pandas as pd
import pytest

from visual_grpo.common import files
from visual_grpo.common.errors import UserError

PACKAGE = Path(files.__file__).parents[1]
HOLDER = "import sys; from pathlib import Path; from visual_grpo.common import files; files.hold(Path(sys.argv[1]))"
STARTER = """
import os, signal, subprocess, sys
from pathlib import Path
from visual_grpo.common import files

print(subprocess.Popen(["sleep", "60"], pass_fds=[files.hold(Path(sys.argv[1]))]).pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
"""Starts a program that inherits the lock, prints its number, and is killed."""


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    files.release()


def test_text_in_a_table_for_people_is_never_a_formula(tmp_path: Path) -> None:
    formulas = ["=HYPERLINK(0)", "+1", "-1", "@x", "\t=1", "\r=1", "\n=1"]
    table = pd.DataFrame(
        {"=prompt": [*formulas, "a = b\r=1", "'", None], "score": [-1.5, *range(9)], "n": range(-9, 1)}
    )
    files.write_csv(tmp_path / "a.csv", table)
    with (tmp_path / "a.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["'=prompt", "score", "n"]
    assert [row[0] for row in rows] == [*(f"'{formula}" for formula in formulas), "a = b\r=1", "'", ""]
    assert [row[1:] for row in rows][:2] == [["-1.5", "-9"], ["0.0", "-8"]]


def test_only_the_trainings_numbers_are_written_in_another_way() -> None:
    writers = [
        path.name
        for path in sorted(PACKAGE.rglob("*.py"))
        if re.search(r"to_csv|csv\.writer|DictWriter", path.read_text())
    ]
    assert writers == ["files.py", "run.py"]


def test_a_second_holder_is_refused_until_the_first_has_ended_however_that_is(tmp_path: Path) -> None:
    lock = tmp_path / "output/.lock"
    code = f"{HOLDER}; print(flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", code, str(lock)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        first.stdout.readline()
        holder = f"process {first.pid} on {re.escape(socket.gethostname())}"
        with pytest.raises(files.InUseError, match=f"output is in use by another command, {holder}: .*output=FOLDER"):
            files.hold(lock)
        files.hold(tmp_path / "another/.lock")
        first.kill()
    files.hold(lock)
    with pytest.raises(UserError, match=f"process {os.getpid()}"):
        files.hold(lock)
    files.release()
    assert not lock.exists()
    lock.write_text("process 1 on a machine that was killed")
    files.hold(lock)


def test_a_disk_without_locks_gets_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(descriptor: int, *, blocking: bool) -> bool:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(files, "lock_descriptor", refused)
    files.hold(tmp_path / ".lock")
    files.release()
    assert "has no file locks. Run one command at a time in this folder." in capsys.readouterr().out.replace("\n", " ")


def test_a_program_that_has_inherited_a_lock_holds_it_after_its_starter_was_killed(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    with subprocess.Popen([sys.executable, "-c", STARTER, str(lock)], stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        program = int(starter.stdout.readline())
    assert starter.returncode == -signal.SIGKILL
    with pytest.raises(files.InUseError, match=f"process {starter.pid} on .* what it has started"):
        files.hold(lock)
    os.kill(program, signal.SIGKILL)
    for _ in range(100):
        with suppress(files.InUseError):
            files.hold(lock)
            break
        time.sleep(0.01)
    assert lock.read_text().startswith(f"process {os.getpid()} on")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/\.lock cannot be written: .* Write elsewhere with output=FOLDER"):
        files.hold(tmp_path / "file/.lock")


def test_a_file_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "new/file"
    files.write_atomically(file, "ü")
    assert file.read_bytes() == "ü".encode()

    def full(path: Path) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(files, "flush", full)
    with pytest.raises(OSError, match="No space"):
        files.write_atomically(file, b"other")
    assert [path.name for path in file.parent.iterdir()] == ["file"]
    assert file.read_bytes() == "ü".encode()
