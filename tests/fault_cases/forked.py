"""``kedro run`` in a fork of this process: a separate process, which need not import everything anew."""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tests.fault_cases.fault import Moment

SECONDS = 240.0
"""Most that a command may take."""
DELIVER = ".venv/bin/python -m visual_grpo.tracking.deliver"
LOG, BESIDE = "log.txt", "beside.txt"
"""Files for what is printed, beside the project."""
LIST_MODULES = "LIST_MODULES"
"""Environment variable: a file for the names of what the command has imported."""


@dataclass(frozen=True)
class Ended:
    """``code`` as a shell shows it, 128 + N after signal N; ``printed`` is stdout and stderr in their order."""

    code: int
    printed: str


def run(
    line: str,
    project: Path,
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
    inside: Callable[[], None] | None = None,
    moment: Moment | None = None,
) -> Ended:
    """``kedro run`` with the options ``line``, or `DELIVER` with its arguments; permissions count for root too.

    Args:
        environment: added to that of this process.
        inside: called in the new process before the command.
    """
    pid = _start(line, project, project.parent / LOG, environment, inside)
    code = _wait(pid, project, moment)
    return Ended(code if code >= 0 else 128 - code, printed(project))


def printed(project: Path, log: str = LOG) -> str:
    """What the command has printed so far."""
    return (project.parent / log).read_text(encoding="utf-8", errors="replace")


@contextmanager
def running(line: str, project: Path, until: Callable[[Path, str], bool]) -> Iterator[None]:
    """A command that goes on beside others from the moment ``until``, and is killed in the end."""
    pid = _start(line, project, project.parent / BESIDE, {}, None)
    try:
        deadline = time.monotonic() + SECONDS
        while not until(project, printed(project, BESIDE)):
            assert time.monotonic() < deadline, printed(project, BESIDE)
            time.sleep(0.01)
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def preload(names: Path) -> None:
    """Imports what an earlier command had imported, as `LIST_MODULES` tells."""
    for name in names.read_text(encoding="utf-8").split():
        if name not in sys.modules:
            with suppress(Exception):
                importlib.import_module(name)


def _start(
    line: str, project: Path, log: Path, environment: Mapping[str, str], inside: Callable[[], None] | None
) -> int:
    log.write_bytes(b"")
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _become(shlex.split(line), project, log, environment, inside)
    return pid


def _become(
    words: list[str], project: Path, log: Path, environment: Mapping[str, str], inside: Callable[[], None] | None
) -> None:
    """Never returns."""
    code: object = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP):  # A process in the background may have inherited others.
            signal.signal(number, signal.SIG_DFL)
        os.chdir(project)
        os.environ.update(environment)
        _heed_permissions()
        if inside is not None:
            inside()
        _command(words)
        code = 0
    except SystemExit as exited:
        code = exited.code
    except BaseException:
        traceback.print_exc()
    if LIST_MODULES in os.environ:
        Path(os.environ[LIST_MODULES]).write_text(" ".join(sorted(sys.modules)), encoding="utf-8")
    with suppress(BaseException):  # What the interpreter does at its end.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _command(words: list[str]) -> None:
    """Ends with SystemExit."""
    deliver = shlex.split(DELIVER)
    if words[: len(deliver)] == deliver:
        from visual_grpo.tracking.deliver import main as delivered

        sys.argv = words[len(deliver) - 1 :]
        delivered()
    from kedro.framework.cli import main

    sys.argv = [".venv/bin/kedro", "run", *words]
    main()


def _wait(pid: int, project: Path, moment: Moment | None) -> int:
    deadline = time.monotonic() + SECONDS
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if moment is not None and moment[0](project, printed(project)):
            moment[1](project, pid)
            moment = None
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _heed_permissions() -> None:
    """Takes the capabilities of root away (Linux), by which it may read and write what permissions forbid."""
    if os.geteuid() == 0:
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)())
