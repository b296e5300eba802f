"""The command that is running, as its training records it: what a node would otherwise ask git, DVC and MLflow for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from visual_grpo.tracking import run_origin
from visual_grpo.tracking.tracker import Tracker


@dataclass(frozen=True)
class Running:
    """A command in the folder of a project; by default it logs to nothing, as in a script."""

    project: Path = field(default_factory=Path.cwd)
    log: Tracker = field(default_factory=Tracker)

    def facts(self, read: Sequence[str | Path]) -> dict[str, str]:
        """Returns the command line, commit, versions and DVC's hashes of what is ``read``, by their names in a
        record."""
        found = {"command": run_origin.command(), **run_origin.git_tags(self.project), **run_origin.version_tags()}
        return found | run_origin.dvc_tags(self.project, read)

    def changes(self) -> bytes:
        """Returns what the code differs in from its commit (`tracking.run_origin.changes`)."""
        return run_origin.changes(self.project)
