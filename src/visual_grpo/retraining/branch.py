"""Commits files on a branch without touching what is checked out, unless that branch itself is."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from visual_grpo.errors import UserError
from visual_grpo.tracking.lineage import DECISIVE

_NOT_THERE = ""
"""For git: the branch must not exist."""


def check(project: Path, branch: str) -> None:
    """Raises UserError where nothing can be committed on a branch of this name."""
    git = _Git(project)
    git("rev-parse", "HEAD")
    if git.maybe("check-ref-format", "--branch", branch) is None:
        raise UserError(f"retrain.commit is {branch!r}, which is no name of a branch for git.")


def commit(project: Path, branch: str, files: Sequence[str], message: str) -> str | None:
    """Commits the present contents of ``files`` on ``branch``, which is made from the present commit if it is new.

    Other changes of the working tree, staged or not, are left as they are.

    Returns:
        The commit; None if the branch has these contents already.

    Raises:
        UserError: there is no repository, or git refuses.
    """
    git = _Git(project)
    there = [file for file in files if (project / file).is_file()]
    reference = f"refs/heads/{branch}"
    before = git.maybe("rev-parse", "--verify", "--quiet", reference)
    parent = before or git("rev-parse", "HEAD")
    with tempfile.TemporaryDirectory() as folder:
        # A temporary index: the user's may have other things staged.
        index = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        git("read-tree", parent, **index)
        git("add", "--force", "--", *there, **index)
        tree = git("write-tree", **index)
    if tree == git("rev-parse", f"{parent}^{{tree}}"):
        return None
    made = git("commit-tree", tree, "-p", parent, "-m", message)
    git("update-ref", reference, made, before or _NOT_THERE)  # Refused if somebody else was faster.
    if git.maybe("symbolic-ref", "--quiet", "HEAD") == reference:
        git("reset", "--quiet", "--", *there)  # Of the checked out branch the index follows.
    return made


def uncommitted(project: Path, files: Sequence[str]) -> list[str]:
    """What results depend on and no commit has, beside ``files``, which were committed on a branch."""
    status = _Git(project)("status", "--porcelain", "--untracked-files=all", "-z", "--", *DECISIVE)
    return sorted({entry[3:] for entry in status.split("\0") if entry[2:3] == " "} - set(files))


def changed(project: Path, files: Sequence[str]) -> list[str]:
    """Those of ``files`` that the present commit does not have as they are; none where there is no repository."""
    status = _Git(project).maybe("status", "--porcelain", "--untracked-files=all", "-z", "--", *files)
    return [] if status is None else sorted(entry[3:] for entry in status.split("\0") if entry)


class _Git:
    def __init__(self, project: Path) -> None:
        self.project = project

    def __call__(self, *arguments: str, **variables: str) -> str:
        done = self._run(arguments, variables)
        if done.returncode:
            raise UserError(f"retrain.commit: git {arguments[0]} failed: {done.stderr.strip()}")
        return done.stdout.strip("\n")

    def maybe(self, *arguments: str) -> str | None:
        """None where git says no."""
        done = self._run(arguments, {})
        return done.stdout.strip("\n") if done.returncode == 0 else None

    def _run(self, arguments: Sequence[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                ["git", *arguments],
                cwd=self.project,
                env={**os.environ, **variables},
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError as error:
            raise UserError(f"retrain.commit needs git: {error}") from error
