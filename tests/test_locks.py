"""The lock of an output folder: one holder at a time, named; gone with its process, however that ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from visual_grpo import locks
from visual_grpo.errors import UserError

HOLDER = """
import sys, time
from pathlib import Path
from visual_grpo import locks
locks.hold(Path(sys.argv[1]), "kedro run --pipeline=train", print)
Path(sys.argv[2]).touch()
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    locks.release()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the lock of `tmp_path`/output."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock_of(tmp_path)), str(tmp_path / "held")])
    deadline = time.monotonic() + 60
    while not (tmp_path / "held").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    yield process
    process.kill()
    process.wait()


def lock_of(folder: Path) -> Path:
    return folder / "output" / ".lock"


def hold(file: Path) -> list[str]:
    notes: list[str] = []
    locks.hold(file, "kedro run", notes.append)
    return notes


def test_the_second_is_refused_and_told_who_holds_it(tmp_path: Path, other: subprocess.Popen[bytes]) -> None:
    before = {path: path.read_bytes() for path in sorted((tmp_path / "output").iterdir())}
    with pytest.raises(UserError) as error:
        hold(lock_of(tmp_path))
    said = str(error.value)
    assert f"{tmp_path / 'output'} is in use by process {other.pid} on {socket.gethostname()} since 20" in said
    assert "kedro run --pipeline=train" in said
    assert "output=FOLDER" in said
    assert {path: path.read_bytes() for path in sorted((tmp_path / "output").iterdir())} == before
    assert hold(tmp_path / "another" / ".lock") == []


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path, other: subprocess.Popen[bytes]) -> None:
    other.send_signal(signal.SIGKILL)
    other.wait()
    [note] = hold(lock_of(tmp_path))
    assert "was in use by a command that was killed" in note
    assert f"process {other.pid} on" in note
    said = json.loads(lock_of(tmp_path).with_name(".lock.json").read_text())
    assert (said["pid"], said["command"]) == (os.getpid(), "kedro run")


def test_what_is_released_is_free_without_a_word(tmp_path: Path) -> None:
    assert hold(lock_of(tmp_path)) == []
    with pytest.raises(UserError, match=f"process {os.getpid()} "):
        hold(lock_of(tmp_path))
    locks.release()
    assert not lock_of(tmp_path).with_name(".lock.json").exists()
    assert hold(lock_of(tmp_path)) == []


def said_by(tmp_path: Path, **changes: str) -> Path:
    """A holder's file without a lock that this machine could see."""
    hold(lock_of(tmp_path))
    file = lock_of(tmp_path).with_name(".lock.json")
    content = file.read_text()
    locks.release()
    file.write_text(json.dumps(json.loads(content) | changes))
    return file


def test_the_lock_of_another_machine_is_refused_with_what_to_do(tmp_path: Path) -> None:
    file = said_by(tmp_path, host="node7", boot="another")
    for _ in range(2):
        with pytest.raises(UserError, match=r"(?s)on node7 since .* cannot be seen from") as error:
            hold(lock_of(tmp_path))
        assert f"delete {file}" in str(error.value)
    file.unlink()
    assert hold(lock_of(tmp_path)) == []


@pytest.mark.parametrize("changes", [{"host": "container"}, {"boot": "before the restart"}])
def test_another_container_or_an_earlier_start_is_of_this_machine(tmp_path: Path, changes: dict[str, str]) -> None:
    if "host" in changes and not Path("/proc/sys/kernel/random/boot_id").exists():
        pytest.skip("containers of one machine are told by Linux only")
    said_by(tmp_path, **changes)
    assert "was in use by a command that was killed" in hold(lock_of(tmp_path))[0]


def test_half_a_holders_file_is_of_a_killed_process(tmp_path: Path) -> None:
    said_by(tmp_path).write_text('{"pid": 1')
    assert hold(lock_of(tmp_path)) == []
