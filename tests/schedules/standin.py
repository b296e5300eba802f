"""A project in which the retraining is a program that notes how it was called and ends with a chosen exit code."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.small_project import ROOT

SCHEDULES = ROOT / "schedules"
PATH = "/path/to/visual-grpo"
"""What a user replaces."""
CGROUPS = [Path("/sys/fs/cgroup") / name for name in ("systemd", "unified", "")]
_PYTHON = """#!/bin/bash
cd "$(dirname "$0")/../.."
echo "$@ in $OLDPWD with ${MLFLOW_TRACKING_URI-nothing}" >> calls
trap 'echo stopped >> calls; exit 143' TERM
for ((waited = 0; waited < $(cat seconds); waited++)); do sleep 1; done
echo "said by the retraining"
exit "$(cat code)"
"""


@dataclass(frozen=True)
class StandIn:
    """The project's folder."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> StandIn:
        shutil.copytree(SCHEDULES, folder / "schedules")
        python = folder / ".venv/bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(_PYTHON, encoding="utf-8")
        python.chmod(0o755)
        project = cls(folder)
        project.ends_with(0)
        return project

    def ends_with(self, code: int, after: int = 0) -> None:
        """Args: after: seconds."""
        (self.folder / "code").write_text(str(code))
        (self.folder / "seconds").write_text(str(after))

    def calls(self) -> list[str]:
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []


def is_possible(*programs: str) -> bool:
    """Whether the programs are there, and this process may make namespaces."""
    return os.getuid() == 0 and all(shutil.which(program) for program in ("unshare", *programs))


def run_apart(script: str, cgroup: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a Bash script with separate mounts and process numbers; what it started ends with it.

    Args:
        cgroup: name of a new control group for the script, below which a systemd makes its own.
    """
    groups = [] if cgroup is None else [top / cgroup for top in CGROUPS if (top / "cgroup.procs").exists()]
    for group in groups:
        group.mkdir()
    joins = "".join(f"echo $$ > {group}/cgroup.procs; " for group in groups)
    apart = "exec unshare --mount --pid --fork --kill-child --mount-proc bash -euo pipefail -c"
    try:
        return _run(["bash", "-euc", f'{joins}{apart} "$1"', "apart", script])
    finally:
        for group in groups:
            for inner in [*sorted(group.glob("**/"), key=lambda path: -len(path.parts))]:
                inner.rmdir()


def _run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False)
