"""Other programs leave nothing behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from visual_grpo.reproduction.programs import ProgramError, output_of, run


def test_what_is_printed_and_what_failed(tmp_path: Path) -> None:
    assert output_of("sh", "-c", "echo one; echo two >&2", at=tmp_path) == "one\ntwo\n"
    with pytest.raises(ProgramError, match="no such thing"):
        output_of("sh", "-c", "echo no such thing; exit 3", at=tmp_path)
    with pytest.raises(ProgramError, match="exit code 3"):
        output_of("sh", "-c", "exit 3", at=tmp_path)
    with pytest.raises(ProgramError, match="no-such-program cannot be run"):
        output_of("no-such-program", at=tmp_path)


def test_an_interrupt_ends_the_program_and_what_it_started(tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        numbers.append(int(line))
        raise KeyboardInterrupt

    numbers: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        run(["sh", "-c", "trap '' INT TERM; sleep 60 & echo $!; wait"], tmp_path, None, interrupt)
    for _ in range(100):
        if not _runs(numbers[0]):
            break
        time.sleep(0.05)
    assert not _runs(numbers[0])


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
