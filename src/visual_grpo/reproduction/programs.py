"""Other programs: run with what they print in hand, and ended with everything that they started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_SHOWN_LINES = 12


class ProgramError(Exception):
    """A program failed; the message has its last lines."""


def output_of(*words: str | Path, at: Path, environment: Mapping[str, str] | None = None) -> str:
    """What a program prints.

    Raises:
        ProgramError: it cannot be run, or fails.
    """
    lines: list[str] = []
    run([str(word) for word in words], at, environment, lines.append)
    return "".join(lines)


def run(
    words: Sequence[str],
    at: Path,
    environment: Mapping[str, str] | None,
    each: Callable[[str], object],
    descriptors: Sequence[int] = (),
) -> None:
    """Runs a program in the folder ``at``; ``each`` gets every line that it prints, errors too.

    It is in a new process group: Ctrl-C reaches this process alone, which then kills the whole group. What it was
    writing is of no use to anybody.

    Args:
        descriptors: open files that it inherits.

    Raises:
        ProgramError: it cannot be run, or fails.
    """
    last: list[str] = []
    try:
        process = subprocess.Popen(
            words,
            cwd=at,
            env=None if environment is None else dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            pass_fds=descriptors,
        )
    except OSError as error:
        raise ProgramError(f"{words[0]} cannot be run: {error}") from error
    assert process.stdout is not None
    try:
        for line in process.stdout:
            last = [*last[1 - _SHOWN_LINES :], line]
            each(line)
        # Until it is waited for, its number cannot become that of another group.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    finally:
        with suppress(ProcessLookupError, PermissionError):  # All have ended.
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        process.stdout.close()
    if code:
        raise ProgramError("".join(last).strip() or f"it ended with the exit code {code}")
