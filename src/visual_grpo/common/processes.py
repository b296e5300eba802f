"""Signals that stop a command, and programs that it runs and stops with everything they started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

TERMINATING = (signal.SIGTERM, signal.SIGHUP)
"""Sent by ``kill`` and batch systems, and by a terminal that is closed."""
_ONE_STOP = 5.0
"""Seconds in which the same signal counts once."""
REASON = "VISUAL_GRPO_REASON"
"""Environment variable: the file into which a command that `run` has started writes why it fails."""
STORE = "VISUAL_GRPO_STORE"
"""Environment variable: the file by which the ranks find each other that a command has started by itself."""


def is_rank() -> bool:
    """Returns whether torchrun has started this process, as one of several ranks."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def under_torchrun() -> bool:
    """Returns whether the user has started this command with torchrun."""
    return is_rank() and STORE not in os.environ


class Stopped(KeyboardInterrupt):
    """A signal ended the command."""

    def __init__(self, number: signal.Signals = signal.SIGINT) -> None:
        super().__init__()
        self.number = number


def signal_of(interrupt: KeyboardInterrupt) -> signal.Signals:
    """Returns the signal; Python itself raises a plain KeyboardInterrupt at Ctrl-C."""
    return interrupt.number if isinstance(interrupt, Stopped) else signal.SIGINT


class StopRequest:
    """``by`` is the signal that has arrived, SIGINT or one of `TERMINATING`; None so far."""

    def __init__(self) -> None:
        self.by: signal.Signals | None = None


@contextmanager
def stop_request(on_ask: Callable[[], None]) -> Iterator[StopRequest]:
    """Keeps the first SIGINT, SIGTERM or SIGHUP, so that the current work can be finished and saved.

    A second signal acts at once; but a batch system and a launcher may both pass on the same one of `TERMINATING`,
    which is one stop if both come within seconds.
    """
    request = StopRequest()
    asked = time.monotonic()

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if request.by is not None:
            if number != request.by or time.monotonic() - asked > _ONE_STOP:
                _restore(previous)
                signal.raise_signal(number)
            return
        request.by, asked = signal.Signals(number), time.monotonic()
        if number not in TERMINATING:
            _restore(previous)
        _forget_a_closed_terminal(number)
        on_ask()

    previous = _handle(ask, signal.SIGINT, *TERMINATING)
    try:
        yield request
    finally:
        _restore(previous)


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Raises `Stopped` at the signals that are `TERMINATING`, as Ctrl-C raises KeyboardInterrupt."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        _forget_a_closed_terminal(number)
        raise Stopped(signal.Signals(number))

    previous = _handle(interrupt, *TERMINATING)
    try:
        yield
    finally:
        _restore(previous)


@contextmanager
def held_back() -> Iterator[None]:
    """Delays signals until the block has ended: their handlers could raise in a half-done start."""
    arrived: list[int] = []
    previous = _handle(lambda number, frame: arrived.append(number), signal.SIGINT, *TERMINATING)
    try:
        yield
    finally:
        _restore(previous)
        for number in arrived:
            signal.raise_signal(number)


def _handle(handler: Callable[[int, FrameType | None], object], *numbers: signal.Signals) -> dict[int, Any]:
    """Installs a handler, and returns those before; not for SIGTERM and SIGHUP where they are ignored (``nohup``).

    Outside the main thread no handler can be installed, and signals act as usual.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    heard = [n for n in numbers if n not in TERMINATING or signal.getsignal(n) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def _restore(previous: dict[int, Any]) -> None:
    while previous:
        signal.signal(*previous.popitem())


def _forget_a_closed_terminal(number: int) -> None:
    """After SIGHUP, writing to the terminal fails, which must not end what is being saved."""
    if number != signal.SIGHUP:
        return
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and stream.isatty():
                os.dup2(nowhere.fileno(), stream.fileno())


class ProgramError(Exception):
    """A program cannot be run or failed; the message has its last lines."""

    code: int | None = None
    """The exit code with which a program of `run` ended."""


class OutOfTimeError(Exception):
    """A program was stopped because its time was up."""


def output_of(*words: str | Path, at: Path, stdin: bytes | None = None, seconds: float | None = None) -> str:
    """Returns what a short program prints; ``stdin`` is its input.

    Raises ProgramError if it cannot be run, fails, or takes longer than ``seconds``.
    """
    name = Path(words[0]).name
    try:
        done = subprocess.run(
            [str(word) for word in words],
            cwd=at,
            input=stdin,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except OSError as error:
        raise ProgramError(f"{name} cannot be run: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise ProgramError(f"{name} did not end within {seconds:g} s") from error
    printed, complaint = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
    if done.returncode:
        raise ProgramError((complaint or printed).strip() or f"{name} ended with exit code {done.returncode}")
    return printed


def git(at: Path, *words: str | Path, stdin: bytes | None = None) -> str:
    """Returns what git prints, without hooks of the user's repository, such as DVC's.

    Raises ProgramError: git fails, or is not there.
    """
    return output_of("git", "-c", "core.hooksPath=/dev/null", *words, at=at, stdin=stdin).rstrip("\n")


def tell_reason(reason: str) -> None:
    """Tells the command that started this one, through any program in between, why it fails; the first counts."""
    if (file := Path(os.environ.get(REASON, os.devnull))).is_file() and not file.stat().st_size:
        file.write_text(reason, encoding="utf-8")


def run(
    *words: str | Path,
    at: Path,
    patience: float,
    seconds: float = 0,
    environment: Mapping[str, str] | None = None,
    descriptors: tuple[int, ...] = (),
) -> None:
    """Runs a long program and shows its output, under ``timeout``, which passes a stop on to its process group.

    Args:
        patience: seconds from SIGINT to SIGKILL.
        seconds: its time; 0 = no limit.
        descriptors: open files that it inherits.

    Raises:
        ProgramError: it failed, for the reason that one of the commands in it has told (`tell_reason`).
        OutOfTimeError: its time was over.
    """
    began = time.monotonic()
    limited = ["timeout", "--signal=INT", f"--kill-after={patience}", str(seconds), *(str(word) for word in words)]
    process = None
    with tempfile.NamedTemporaryFile(encoding="utf-8", mode="r") as reason:
        variables = {**(os.environ if environment is None else environment), REASON: reason.name}
        try:
            with held_back():
                nothing = subprocess.DEVNULL
                process = subprocess.Popen(limited, cwd=at, env=variables, stdin=nothing, pass_fds=descriptors)
            code = process.wait()
        except BaseException:  # A Ctrl-C reaches this process only.
            if process is not None:
                process.send_signal(signal.SIGINT)
                process.wait()
                _kill_group(process.pid)
            raise
        was_killed = code in (128 + signal.SIGKILL, -signal.SIGKILL)
        if was_killed or code == 124:
            _kill_group(process.pid)
            if seconds and time.monotonic() - began >= seconds:
                raise OutOfTimeError
        if code:
            killed = ": it was killed, as the system does where memory runs out" if was_killed else ""
            error = ProgramError(reason.read() or f"it ended with exit code {code}{killed}")
            error.code = code
            raise error


def _kill_group(number: int) -> None:
    """Kills what ignored the signal and outlived the program."""
    with suppress(ProcessLookupError):
        os.killpg(number, signal.SIGKILL)
