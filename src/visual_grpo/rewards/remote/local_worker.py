"""Reward workers that this process starts for itself and that end with it."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from visual_grpo.common.errors import Remedy, UserError

ENVIRONMENTS = Path(".venv-workers")
"""Holds an environment for each worker, by the name of its folder."""
_LINES = 12
"""Last lines of a worker's errors that are shown."""
SILENCE, PATIENCE = 15.0, 1800.0
"""Seconds after which the user is told that a worker is not ready, and after which it is given up."""
_GRACE = 5.0
"""Seconds for a worker to end by itself."""
KEY = "WORKER_API_KEY"
"""Environment variable of a worker: the key without which it scores nothing."""
_NOT_INHERITED = {
    KEY,
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}
"""Variables of a different worker's key, and of a training in several processes, which a worker is not part of."""
log = logging.getLogger(__name__)

_Start = tuple[Path, tuple[tuple[str, str], ...]]
"""A worker's folder and variables."""


@dataclass(frozen=True, kw_only=True)
class LocalWorker:
    process: subprocess.Popen[str]
    errors: IO[str]
    """The standard error of the process."""
    url: str
    key: str
    """Only this process and the worker know it: other users of the machine reach the worker's port too."""


_running: dict[_Start, LocalWorker] = {}
_one_at_a_time = threading.Lock()


def python_of(worker: str | Path) -> Path:
    """The Python of a worker's own environment, which may not be there."""
    return ENVIRONMENTS / Path(worker).name / "bin" / "python"


def started_worker(worker: str, environment: Mapping[str, str]) -> LocalWorker:
    """Returns the worker in a folder, started at the first call and ready.

    Args:
        environment: variables that it has in addition to those of this process.

    Raises:
        UserError: it is not there, not installed, cannot load its weights, is not ready within `PATIENCE`, or has
            ended.
    """
    start = (Path(worker).resolve(), tuple(sorted((name, str(value)) for name, value in environment.items())))
    with _one_at_a_time:  # Rewards that wait are computed in threads.
        if start not in _running:
            _running[start] = _start(worker, dict(start[1]))
        running = _running[start]
        if running.process.poll() is not None:
            del _running[start]
            raise UserError(f"the worker {worker} has ended with {_end(running.process, running.errors)}")
    return running


def _start(worker: str, environment: Mapping[str, str]) -> LocalWorker:
    from visual_grpo.common.device import in_thread  # It imports torch.

    script, python = Path(worker) / "worker.py", python_of(worker)
    if not script.is_file():
        raise UserError(f"worker is {worker!r}; expected the folder of a worker, such as workers/tesseract")
    if not python.is_file():
        raise UserError(
            f"the worker {worker} is not installed: it has no {python}.",
            remedy=Remedy(make=f"install-worker NAME={script.parent.name}"),
        )
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    key = secrets.token_urlsafe()
    errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
    # Its stdin is never written to: it ends when this process does, however that happens. In its own session,
    # because a Ctrl-C lets the current step be finished, which may need scores.
    process = subprocess.Popen(
        [str(python), str(script), "--port=0", "--until-eof"],
        env={**inherited, **environment, KEY: key, "PYTHONPATH": str(script.parents[1])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
    )
    log.info("Starting the worker %s", worker)
    waited, silence = 0.0, SILENCE
    ready = in_thread(lambda: _url(process), "starting a worker")
    while waited < PATIENCE:
        with suppress(TimeoutError):
            if url := ready.result(silence):
                return LocalWorker(process=process, errors=errors, url=url, key=key)
            raise UserError(f"the worker {worker} has ended with {_end(process, errors)}")
        waited += silence
        if waited < PATIENCE:
            log.warning("The worker %s is not ready after %g s; it is given up after %g s", worker, waited, PATIENCE)
        silence = min(waited, PATIENCE - waited)
    raise UserError(
        f"the worker {worker} was not ready within {PATIENCE:g} s and was ended, with {_end(process, errors)}\nThe"
        " first start downloads the weights. Start the worker by hand once to wait for them.",
        remedy=Remedy(make=f"worker NAME={script.parent.name}"),
    )


def _url(process: subprocess.Popen[str]) -> str | None:
    """Returns the address of a worker as soon as it is ready; None if it has ended."""
    url = None
    assert process.stdout is not None
    for line in process.stdout:  # "NAME: URL, loading", then what its libraries print, then "NAME: ready"
        if line.endswith(", loading\n"):
            url = line.removesuffix(", loading\n").rpartition(" ")[2]
        if line.endswith(": ready\n"):
            return url
    return None


def _end(process: subprocess.Popen[str], errors: IO[str]) -> str:
    """Ends a worker; returns its exit code and last lines."""
    with errors, process:
        assert process.stdin is not None
        process.stdin.close()  # At which it ends.
        try:
            code = process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        errors.seek(0)
        return f"exit code {code}:\n{''.join(errors.readlines()[-_LINES:]).rstrip()}"
