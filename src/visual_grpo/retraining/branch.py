"""Commits files on a branch without touching the working tree."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from visual_grpo.errors import UserError
from visual_grpo.programs import ProgramError, git


def check(project: Path, branch: str) -> None:
    """Raises UserError where nothing can be committed on a branch of this name."""
    try:
        git(project, "rev-parse", "--verify", "HEAD")
        git(project, "check-ref-format", "--branch", branch)
    except ProgramError as error:
        raise UserError(f"retrain.commit={branch}: {error}") from error


def commit(project: Path, branch: str, files: Sequence[Path], message: str) -> str | None:
    """Commits the present contents of ``files``; a new branch begins at the present commit.

    Returns:
        The commit; None if the branch has these contents already.

    Raises:
        ProgramError: git refuses.
    """
    if git(project, "branch", "--show-current") == branch:
        return _commit(project, files, message)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "branch"
        there = git(project, "branch", "--list", branch)
        git(project, "worktree", "add", "--quiet", *((place, branch) if there else ("-b", branch, place)))
        try:
            for file in (file for file in files if (project / file).is_file()):
                (place / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(project / file, place / file)
            return _commit(place, files, message)
        finally:
            git(project, "worktree", "remove", "--force", place)


def changed(project: Path, files: Sequence[str | Path]) -> list[str]:
    """Returns those of ``files`` that differ from the present commit; none where there is no repository."""
    try:
        status = git(project, "status", "--porcelain", "--untracked-files=all", "--", *files)
    except ProgramError:
        return []
    return sorted(line[3:] for line in status.splitlines())


def _commit(at: Path, files: Sequence[Path], message: str) -> str | None:
    there = [file for file in files if (at / file).is_file()]
    if not changed(at, there):
        return None
    git(at, "add", "--", *there)
    git(at, "commit", "--quiet", "--only", "--message", message, "--", *there)
    return git(at, "rev-parse", "HEAD")
