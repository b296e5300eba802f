"""Other programs: what they print, how they fail, and that a stop reaches everything that they started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from visual_grpo.programs import OutOfTimeError, ProgramError, output_of, run

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
    assert output_of("cat", at=tmp_path, given="a\n") == "a\n"
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


def test_lines_are_passed_on_and_the_last_ones_are_in_the_error(tmp_path: Path) -> None:
    lines: list[str] = []
    with pytest.raises(ProgramError, match=r"(?s)^8\n.*19$") as told:
        run("sh", "-c", "seq 0 19; exit 4", at=tmp_path, patience=1, each=lines.append)
    assert len(lines) == 20
    assert len(str(told.value).splitlines()) == 12
    run("sh", "-c", 'test "$A" = b', at=tmp_path, patience=1, environment=os.environ | {"A": "b"})


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
        "from pathlib import Path; from visual_grpo.programs import run; from visual_grpo.stopping import *\n"
        f"with terminate_as_interrupt(): run('sh', '-c', {SLEEPER!r}, at=Path(), patience=5)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        while not (tmp_path / "sleeping").is_file() or not (tmp_path / "sleeping").read_text():
            assert process.poll() is None
        time.sleep(1)  # On a busy machine the program may run before its start has returned.
        process.send_signal(number)
    assert process.returncode
    assert has_ended(tmp_path / "sleeping")
