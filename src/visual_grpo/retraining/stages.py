"""DVC's stages of an environment: which would run, running them, and committing their dvc.lock."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from visual_grpo.errors import UserError
from visual_grpo.programs import ProgramError, git, output_of
from visual_grpo.retraining.outcome import DataRefusedError
from visual_grpo.tracking.lineage import dvc_files, stages_of

PREPARE, TRAIN = "data_preparation", "train"
_DVC = (sys.executable, "-m", "dvc")
_ALWAYS = "parameters"
"""The stage that always runs: a retraining has done its work before."""


class Stages:
    """The stages in one dvc.yaml.

    Args:
        file: relative to the working folder, the project's.
        run: runs a long command whose output is seen.
    """

    def __init__(self, file: Path, run: Callable[..., None]) -> None:
        self.file, self._run = file, run
        self.lock = file.with_name("dvc.lock")
        self._earlier = file.with_name(".dvc.lock.earlier")

    def check(self) -> None:
        """Raises UserError where DVC is not set up, or dvc.lock is damaged."""
        if not Path(".dvc").is_dir():
            raise UserError(f"{Path.cwd()} is no DVC repository (no .dvc). Make it one: .venv/bin/dvc init")
        stages_of(self.lock, Path.cwd())

    def update_imports(self) -> list[str]:
        """Fetches newer versions of what ``dvc import`` and ``dvc import-url`` brought; returns these ``*.dvc``."""
        files = [file for file in dvc_files(Path.cwd()) if (yaml.safe_load(file.read_text("utf-8")) or {}).get("deps")]
        names = [file.relative_to(Path.cwd()).as_posix() for file in files]
        if names:
            self._run(*_DVC, "update", *names)
        return names

    def changed(self, stage: str | None = None) -> list[str]:
        """Returns what changed since the last time; empty if ``stage`` and all before it need not run."""
        status = json.loads(output_of(*_DVC, "status", "--json", self._target(stage), at=Path.cwd()) or "{}")
        changes = {name.rpartition(":")[2]: changes for name, changes in status.items()}
        return [f"{name}: {', '.join(_in_words(found))}" for name, found in changes.items() if name != _ALWAYS]

    def repeat(self, stage: str | None = None) -> None:
        """Runs the stages that have changed, up to ``stage``."""
        self._run(*_DVC, "repro", self._target(stage))

    def prepare(self, check: Callable[[], None]) -> None:
        """Prepares the data; puts the earlier ones back if that fails or ``check`` refuses them.

        A call after one that was killed in between does so too.
        """
        if not self._earlier.is_file():
            self._earlier.write_bytes(self.lock.read_bytes() if self.lock.is_file() else b"")
        try:
            self.repeat(PREPARE)
            check()
        except (DataRefusedError, ProgramError):
            self._put_back()
            raise
        self._earlier.unlink()

    def _put_back(self) -> None:
        earlier = self._earlier.read_bytes()
        self._earlier.unlink()
        if not earlier:
            self.lock.unlink(missing_ok=True)
            return
        self.lock.write_bytes(earlier)
        output_of(*_DVC, "checkout", "--quiet", "--force", self._target(PREPARE), at=Path.cwd())

    def _target(self, stage: str | None) -> str:
        return str(self.file) if stage is None else f"{self.file}:{stage}"


def _in_words(changes: Any) -> Iterator[str]:
    """``[{"changed deps": {"src": "modified"}}, "changed command"]`` -> ``src modified``, ``changed command``."""
    if isinstance(changes, str):
        yield changes
    elif isinstance(changes, Mapping):
        for name, change in changes.items():
            yield from [f"{name} {change}"] if isinstance(change, str) else _in_words(change)
    else:
        for change in changes:
            yield from _in_words(change)


def check_branch(project: Path, branch: str) -> None:
    """Raises UserError where nothing can be committed on a branch of this name."""
    try:
        git(project, "rev-parse", "--verify", "HEAD")
        git(project, "check-ref-format", "--branch", branch)
    except ProgramError as error:
        raise UserError(f"retrain.commit={branch}: {error}") from error


def commit(project: Path, branch: str, files: Sequence[Path], message: str) -> str | None:
    """Commits the present contents of ``files``; a new branch begins at the present commit.

    A branch that is not checked out is checked out elsewhere: the working tree stays as it is.

    Returns:
        The commit; None if the branch has these contents already.

    Raises:
        ProgramError: git refuses.
    """
    files = [file for file in files if (project / file).is_file()]
    if git(project, "branch", "--show-current") == branch:
        return _commit(project, files, message)
    if not git(project, "branch", "--list", branch):
        git(project, "branch", branch)
    with tempfile.TemporaryDirectory() as folder:
        git(project, "worktree", "add", "--quiet", folder, branch)
        try:
            for file in files:
                (Path(folder) / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(project / file, Path(folder) / file)
            return _commit(Path(folder), files, message)
        finally:
            git(project, "worktree", "remove", "--force", folder)


def _commit(at: Path, files: Sequence[Path], message: str) -> str | None:
    if not git(at, "status", "--porcelain", "--untracked-files=all", "--", *files):
        return None
    git(at, "add", "--", *files)
    git(at, "commit", "--quiet", "--only", "--message", message, "--", *files)
    return git(at, "rev-parse", "HEAD")
