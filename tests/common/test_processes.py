"""Other programs: what they print, how they fail, and that a stop reaches everything that they started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from visual_grpo.common import processes
from visual_grpo.common.processes import (
    OutOfTimeError,
    ProgramError,
    Stopped,
    output_of,
    run,
    stop_request,
    terminate_as_interrupt,
)

SLEEPER = "sleep 60 & echo $! > sleeping; wait"


def has_ended(file: Path) -> bool:
    """Whether the process with the number in ``file`` ends within seconds."""
    status = Path(f"/proc/{file.read_text().strip()}/stat")
    for _ in range(100):
        if not status.is_file() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_what_a_program_prints_is_returned_and_a_failure_has_its_words(tmp_path: Path) -> None:
    assert output_of("cat", at=tmp_path, stdin=b"a\n") == "a\n"
    assert output_of("printf", "\\377", at=tmp_path) == "\N{REPLACEMENT CHARACTER}"
    for words, said in {
        ("sh", "-c", "echo no >&2; exit 3"): "^no$",
        ("sh", "-c", "exit 3"): "^sh ended with exit code 3$",
        ("no-such-program",): "^no-such-program cannot be run",
    }.items():
        with pytest.raises(ProgramError, match=said):
            output_of(*words, at=tmp_path)
    with pytest.raises(ProgramError, match=r"^sleep did not end within 0\.1 s"):
        output_of("sleep", "9", at=tmp_path, seconds=0.1)


def test_a_long_program_gets_its_environment_and_its_failure_is_told(tmp_path: Path) -> None:
    run("sh", "-c", 'test "$A" = b', at=tmp_path, patience=1, environment=os.environ | {"A": "b"})
    for ending, said in {
        "exit 4": "4$",
        "exit 124": "124$",  # As `timeout` ends when the time is up.
        "kill -9 $$": "-9: it was killed, as the system does where memory runs out$",
        "sh -c 'kill -9 $$'; exit $?": "137: it was killed",
    }.items():
        with pytest.raises(ProgramError, match=f"^it ended with exit code {said}"):
            run("sh", "-c", ending, at=tmp_path, patience=1, seconds=60)


def test_what_takes_too_long_is_stopped_with_everything_that_it_started(tmp_path: Path) -> None:
    with pytest.raises(OutOfTimeError):
        run("sh", "-c", SLEEPER, at=tmp_path, patience=5, seconds=0.5)
    assert has_ended(tmp_path / "sleeping")
    began = time.monotonic()
    with pytest.raises(OutOfTimeError):
        run("sh", "-c", "trap '' INT; sleep 60", at=tmp_path, patience=0.5, seconds=0.5)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_of_this_process_is_passed_on(tmp_path: Path, number: signal.Signals) -> None:
    code = (
        "from pathlib import Path; from visual_grpo.common.processes import run\n"
        "from visual_grpo.common.processes import *\n"
        f"with terminate_as_interrupt(): run('sh', '-c', {SLEEPER!r}, at=Path(), patience=5)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        while not (tmp_path / "sleeping").is_file() or not (tmp_path / "sleeping").read_text():
            assert process.poll() is None
        process.send_signal(number)
    assert process.returncode
    assert has_ended(tmp_path / "sleeping")


def test_a_stop_while_a_program_is_being_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: object, **options: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen[bytes](*words, **options))  # type: ignore[call-overload]
        signal.raise_signal(signal.SIGINT)
        return started[0]

    monkeypatch.setattr(processes, "subprocess", SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL))
    with pytest.raises(KeyboardInterrupt):
        run("sleep", "60", at=tmp_path, patience=5)
    assert started[0].poll() is not None


def test_the_same_sigterm_twice_within_seconds_is_one_stop() -> None:
    """A batch system and torchrun both pass it on."""
    asked: list[int] = []
    with terminate_as_interrupt(), stop_request(lambda: asked.append(1)) as request:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert request.by == signal.SIGTERM
        assert asked == [1]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_later_one_acts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_ONE_STOP", -1.0)
    with terminate_as_interrupt(), stop_request(lambda: None):
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGTERM)


def test_a_second_ctrl_c_acts_at_once() -> None:
    with stop_request(lambda: None) as request:
        signal.raise_signal(signal.SIGINT)
        assert request.by == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
