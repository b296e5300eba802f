"""Runs other programs, and stops them with everything that they started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from visual_grpo.common.stopping import held_back


class ProgramError(Exception):
    """A program cannot be run or failed; the message has its last lines."""


class OutOfTimeError(Exception):
    """A program was stopped because its time was over."""


def output_of(*words: str | Path, at: Path, given: str | None = None, seconds: float | None = None) -> str:
    """Returns what a short program prints; ``given`` is its input.

    Raises ProgramError if it cannot be run, fails, or takes longer than ``seconds``.
    """
    name = Path(words[0]).name
    try:
        done = subprocess.run(
            [str(word) for word in words],
            cwd=at,
            input=given,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except OSError as error:
        raise ProgramError(f"{name} cannot be run: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise ProgramError(f"{name} did not end within {seconds:g} s") from error
    if done.returncode:
        raise ProgramError((done.stderr or done.stdout).strip() or f"{name} ended with exit code {done.returncode}")
    return done.stdout


def git(at: Path, *words: str | Path, given: str | None = None) -> str:
    """Returns what git prints, without hooks of the user's repository, such as DVC's.

    Raises ProgramError: git fails, or is not there.
    """
    return output_of("git", "-c", "core.hooksPath=/dev/null", *words, at=at, given=given).rstrip("\n")


def run(
    *words: str | Path,
    at: Path,
    patience: float,
    seconds: float = 0,
    environment: Mapping[str, str] | None = None,
    descriptors: tuple[int, ...] = (),
) -> None:
    """Runs a long program, whose output is shown, under ``timeout``, which passes a stop on to its process group.

    Args:
        patience: seconds from SIGINT to SIGKILL.
        seconds: its time; 0 = no limit.
        descriptors: open files that it inherits.

    Raises:
        ProgramError: it failed.
        OutOfTimeError: its time was over.
    """
    limited = ["timeout", "--signal=INT", f"--kill-after={patience}", str(seconds), *(str(word) for word in words)]
    process = None
    try:
        with held_back():
            process = subprocess.Popen(limited, cwd=at, env=environment, stdin=subprocess.DEVNULL, pass_fds=descriptors)
        code = process.wait()
    except BaseException:  # A Ctrl-C reaches this process only.
        if process is not None:
            process.send_signal(signal.SIGINT)
            process.wait()
            _kill_group(process.pid)
        raise
    if seconds and code in (124, 128 + signal.SIGKILL, -signal.SIGKILL):
        _kill_group(process.pid)
        raise OutOfTimeError
    if code:
        raise ProgramError(f"it ended with exit code {code}")


def _kill_group(number: int) -> None:
    """Kills what ignored the signal and outlived the program."""
    with suppress(ProcessLookupError):
        os.killpg(number, signal.SIGKILL)
