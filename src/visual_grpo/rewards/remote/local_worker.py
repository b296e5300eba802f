"""Reward workers that this process starts for itself and that end with it."""

from __future__ import annotations

import logging
import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from visual_grpo.common.errors import Remedy, UserError

ENVIRONMENTS = Path(".venv-workers")
"""Holds an environment for each worker, by the name of its folder."""
_LINES = 12
"""Last lines of a worker's errors that are shown."""
_NOT_INHERITED = {
    "WORKER_API_KEY",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}
"""Variables of another worker's key, and of a training in several processes, of which a worker is none."""
log = logging.getLogger(__name__)

_Key = tuple[Path, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, kw_only=True)
class _Worker:
    process: subprocess.Popen[str]
    errors: IO[str]
    """What it writes to stderr."""

    def end(self) -> str:
        """Ends it; returns its exit code and last lines."""
        with self.errors, self.process as process:  # Leaving them closes its pipes, at which it ends, and waits.
            assert process.stdin is not None
            process.stdin.close()
            code = process.wait()
            self.errors.seek(0)
            return f"exit code {code}:\n{''.join(self.errors.readlines()[-_LINES:]).rstrip()}"


_running: dict[_Key, tuple[_Worker, str]] = {}
"""Each worker, and its address."""
_one_at_a_time = threading.Lock()


def python_of(worker: str | Path) -> Path:
    """The Python of a worker's own environment, which may not be there."""
    return ENVIRONMENTS / Path(worker).name / "bin" / "python"


def started_worker(worker: str, environment: Mapping[str, str]) -> str:
    """Returns the address of the worker in a folder, started at the first call and ready.

    Args:
        environment: variables that it has beside those of this process.

    Raises:
        UserError: it is not there, not installed, cannot load its weights, or has ended.
    """
    key = (Path(worker).resolve(), tuple(sorted((name, str(value)) for name, value in environment.items())))
    with _one_at_a_time:  # Rewards that wait are computed in threads.
        if key not in _running:
            _running[key] = _start(worker, dict(key[1]))
        running, url = _running[key]
        if running.process.poll() is not None:
            del _running[key]
            raise UserError(f"the worker {worker} has ended with {running.end()}")
    return url


def _start(worker: str, environment: Mapping[str, str]) -> tuple[_Worker, str]:
    script, python = Path(worker) / "worker.py", python_of(worker)
    if not script.is_file():
        raise UserError(f"worker is {worker!r}; expected the folder of a worker, such as workers/tesseract")
    if not python.is_file():
        raise UserError(
            f"the worker {worker} is not installed: it has no {python}.",
            remedy=Remedy(make=f"install-worker NAME={script.parent.name}"),
        )
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
    # Its stdin is never written to: it ends when this process does, however that happens. In its own session,
    # because a Ctrl-C lets the current step be finished, which may need scores.
    process = subprocess.Popen(
        [str(python), str(script), "--port=0", "--until-eof"],
        env={**inherited, **environment, "PYTHONPATH": str(script.parents[1])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
    )
    log.info("Starting the worker %s", worker)
    assert process.stdout is not None
    url = ""
    for line in process.stdout:  # "NAME: URL, loading", then what its libraries print, then "NAME: ready"
        if line.endswith(", loading\n"):
            url = line.removesuffix(", loading\n").rpartition(" ")[2]
        if line.endswith(": ready\n"):
            return _Worker(process=process, errors=errors), url
    raise UserError(f"the worker {worker} has ended with {_Worker(process=process, errors=errors).end()}")
