"""The commands that a retraining calls: DVC, Kedro and git, one after the other, within the time that is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from visual_grpo.retraining.outcome import OutOfTimeError, StageFailedError

_DVC = "visual_grpo.retraining.dvc_without_hints"
PATIENCE = 600.0
"""Seconds that a stopped command has for its checkpoint: it finishes the step."""


@dataclass(frozen=True, kw_only=True)
class Commands:
    """Runs commands in the project's folder; each in a new process group, so that it is stopped with all it started."""

    project: Path
    deadline: float | None
    """Of ``time.monotonic``; None = no limit."""
    descriptors: tuple[int, ...] = ()
    """Open files that the commands inherit: a lock that one of them holds on if the retraining itself is killed."""

    def run(self, *words: str) -> None:
        """Runs a command, whose output is seen.

        Raises:
            StageFailedError: it failed.
            OutOfTimeError: there was no time left; it was stopped as by Ctrl-C.
        """
        code = self._wait(self._start(words))
        if code:
            raise StageFailedError(f"{_shown(words)} ended with exit code {code}")

    def output(self, *words: str) -> str:
        """What a short command prints.

        Raises:
            StageFailedError: it failed; the message has what it said.
        """
        done = subprocess.run(words, cwd=self.project, capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stderr or done.stdout).strip()
            raise StageFailedError(f"{_shown(words)} ended with exit code {done.returncode}: {said}")
        return done.stdout

    def _start(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            words, cwd=self.project, stdin=subprocess.DEVNULL, pass_fds=self.descriptors, process_group=0
        )

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        try:
            return process.wait(None if self.deadline is None else max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            stop(process)
            raise OutOfTimeError from None
        except BaseException:  # Ctrl-C and SIGTERM reach this process only.
            stop(process)
            raise


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and those that it started: as by Ctrl-C, after `PATIENCE` by SIGKILL."""
    for number, patience in ((signal.SIGINT, PATIENCE), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(patience)
            return
        except subprocess.TimeoutExpired:
            continue


def shell(command: str, project: Path, *, seconds: float, given: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a user's line of shell in the project's folder, whose output may be no text.

    Args:
        given: what it can read.

    Raises:
        subprocess.TimeoutExpired: it has not ended in time.
    """
    return subprocess.run(
        ["/bin/sh", "-c", command],
        cwd=project,
        input=given,
        encoding="utf-8",
        errors="replace",
        timeout=seconds,
        check=False,
        capture_output=True,
    )


def dvc(*arguments: str) -> list[str]:
    return [sys.executable, "-m", _DVC, *arguments]


def kedro(pipeline: str, environment: str | None) -> list[str]:
    option = [] if environment is None else [f"--env={environment}"]
    return [sys.executable, "-m", "kedro", "run", f"--pipeline={pipeline}", *option]


def _shown(words: Sequence[str]) -> str:
    if words[0] != sys.executable:
        return " ".join(words)
    return " ".join(words[2:] if words[1] == "-m" else words[1:]).replace(_DVC, "dvc", 1)
