"""The locked environment of a training: the present one where the lock is the same, else a new one."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visual_grpo.errors import UserError
from visual_grpo.reproduction.programs import ProgramError, output_of

LOCK = "requirements.lock"
_OF_THE_RUN = ("MLFLOW", "KEDRO")
"""Beginnings of variables that belong to the command which reproduces."""
_ASK = """
import json, platform, sys
from importlib import metadata
import torch, visual_grpo

def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"

print(json.dumps({
    "file": visual_grpo.__file__,
    "versions": {name: version(name) for name in sys.argv[1:]},
    "python": platform.python_version(),
    "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
}))
"""


@dataclass(frozen=True)
class Environment:
    """A Python with the packages of a lock, which imports the code of a worktree."""

    python: Path
    code: Path
    new: bool
    """Whether it was made for this, because the lock is another than the present one."""

    def variables(self) -> dict[str, str]:
        """Of a process that runs the worktree's code and logs to no MLflow of the user's."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_THE_RUN)}
        before = os.environ.get("PYTHONPATH")
        source = str(self.code / "src")
        return kept | {
            "PYTHONPATH": source if not before else f"{source}{os.pathsep}{before}",
            "MLFLOW_TRACKING_URI": f"sqlite:///{self.code / 'mlflow.db'}",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }

    def facts(self, libraries: list[str]) -> dict[str, Any]:
        """What the environment has: ``versions`` of ``libraries``, ``python``, ``processor`` (its kind and the
        instruction set that torch computes with) and ``gpu`` (None without one).

        Raises:
            UserError: it does not import the worktree's code.
        """
        try:
            said = output_of(self.python, "-c", _ASK, *libraries, at=self.code, environment=self.variables())
            found: dict[str, Any] = json.loads(said.splitlines()[-1])
        except (ProgramError, ValueError, IndexError) as error:
            raise UserError(f"The environment of the run does not start: {error}") from error
        if not Path(found["file"]).resolve().is_relative_to(self.code.resolve()):
            raise UserError(
                f"{self.python} imports visual_grpo from {found['file']}, expected {self.code / 'src'}: what it trains"
                " would not be the code of the run."
            )
        return found


def environment_of(
    code: Path, project: Path, folder: Path, python: str | None, note: Callable[[str], None]
) -> Environment:
    """The environment of the lock in ``code``.

    Args:
        folder: where a new one is made.
        python: the version of the run, such as ``3.11.7``; None = unknown, the present one's.

    Raises:
        UserError: the run's commit has no lock, or it cannot be installed.
    """
    if not (code / LOCK).is_file():
        raise UserError(f"The commit of the run has no {LOCK}, so its environment is not known.")
    if (project / LOCK).is_file() and (code / LOCK).read_bytes() == (project / LOCK).read_bytes():
        return Environment(Path(sys.executable), code, new=False)
    note(f"{LOCK} of the run is another than the present one: installing it into a new environment")
    made = folder / "environment"
    uv = _uv(project)
    try:
        output_of(uv, "venv", "--quiet", "--python", _interpreter(python), made, at=folder)
        sync = [uv, "pip", "sync", "--quiet", "--require-hashes", "--python", str(made / "bin/python"), LOCK]
        output_of(*sync, at=code)
    except ProgramError as error:
        raise UserError(
            f"The packages of the run's {LOCK} cannot be installed. They come from the package index or from uv's"
            f" cache: a network is needed where they are not in the cache.\n{error}"
        ) from error
    return Environment(made / "bin/python", code, new=True)


def _uv(project: Path) -> str:
    own = project / ".venv-tools/bin/uv"
    found = str(own) if own.is_file() else shutil.which("uv")
    if found is None:
        raise UserError("uv, which installs the run's packages, is not there. `make setup` installs it.")
    return found


def _interpreter(version: str | None) -> str:
    """The present Python where its minor version is the run's, else the name of that version."""
    minor = ".".join((version or platform.python_version()).split(".")[:2])
    return sys.executable if platform.python_version().startswith(f"{minor}.") else minor
