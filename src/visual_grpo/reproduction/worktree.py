"""A fresh git worktree at the commit of a training; the user's own working tree is only read."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from visual_grpo.errors import UserError
from visual_grpo.reproduction.programs import ProgramError, output_of

_NO_HOOKS = ("-c", "core.hooksPath=/dev/null")
"""Hooks of the user's repository, such as DVC's checkout, would run in the worktree too."""


@dataclass
class Place:
    """The temporary folder of one reproduction."""

    folder: Path
    code: Path
    """The project at the run's commit, within the worktree."""
    kept: bool = False
    """Whether it stays when the work in it ends."""


def git(project: Path, *words: str | Path) -> str:
    """What git prints without the line's end.

    Raises:
        ProgramError: git fails or is not there.
    """
    return output_of("git", *words, at=project).rstrip("\n")


def check_commit(project: Path, commit: str) -> None:
    """Raises UserError if ``project`` is in no git repository, or its repository has no such commit."""
    try:
        git(project, "rev-parse", "--show-toplevel")
    except ProgramError as error:
        raise UserError(
            f"{project} is in no git repository ({str(error).splitlines()[0]}), so the code of the run cannot be had"
            f" again. Expected the repository with the commit {commit}."
        ) from error
    try:
        git(project, "cat-file", "-e", f"{commit}^{{commit}}")
    except ProgramError as error:
        raise UserError(
            f"The commit of the run, {commit}, is not in this repository. Get it from the repository that the run was"
            " started in, or from the remote that it was pushed to: git fetch --all"
        ) from error


@contextmanager
def checked_out(project: Path, commit: str, changes: str, note: Callable[[str], None]) -> Iterator[Place]:
    """The code at ``commit`` with the patch ``changes``, removed at the end unless it is marked as kept.

    Raises:
        UserError: there is no such commit, or the patch does not apply.
    """
    check_commit(project, commit)
    folder = Path(tempfile.mkdtemp(prefix="visual_grpo_reproduce_"))
    tree, prefix = folder / "code", git(project, "rev-parse", "--show-prefix")
    place = Place(folder, tree / prefix)
    try:
        with suppress(ProgramError):
            git(project, "worktree", "prune")  # Of a reproduction that was killed.
        git(project, *_NO_HOOKS, "worktree", "add", "--quiet", "--detach", tree, commit)
        _apply(tree, folder / "changes.diff", changes)
        yield place
    except ProgramError as error:
        raise UserError(f"git could not check out {commit} into {tree}: {error}") from error
    finally:
        if place.kept:
            note(f"Kept: {folder} (to remove it: rm -r {folder} && git worktree prune)")
        else:
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(ProgramError):
                git(project, "worktree", "prune")


def _apply(tree: Path, file: Path, changes: str) -> None:
    if not changes.strip():
        return
    file.write_text(changes, encoding="utf-8")
    try:
        git(tree, "apply", "--whitespace=nowarn", file)
    except ProgramError as error:
        raise UserError(
            "The run's uncommitted changes (changes.diff of its adapters) do not apply to its commit, so its code"
            f" cannot be had again: {error}\nA secret that was hidden in the patch, or an edit of it, can be the cause."
        ) from error
