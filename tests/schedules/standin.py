"""A project in which the retraining is a program that notes how it was called and ends with a chosen exit code."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.small_project import ROOT

SCHEDULES = ROOT / "schedules"
PATH = "/path/to/visual-grpo"
"""What a user replaces."""
_PYTHON = """#!/bin/bash
cd "$(dirname "$0")/../.."
echo "$@ in $OLDPWD with ${MLFLOW_TRACKING_URI-nothing}" >> calls
echo "said by the retraining"
exit "$(cat code)"
"""


@dataclass(frozen=True)
class StandIn:
    """The project's folder."""

    folder: Path

    @classmethod
    def make(cls, folder: Path, code: int = 0) -> StandIn:
        shutil.copytree(SCHEDULES, folder / "schedules")
        python = folder / ".venv/bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(_PYTHON, encoding="utf-8")
        python.chmod(0o755)
        (folder / "code").write_text(str(code))
        return cls(folder)

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()
