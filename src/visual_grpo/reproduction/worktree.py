"""A fresh git worktree at the commit of a training; the user's own working tree is only read."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from visual_grpo.errors import UserError
from visual_grpo.reproduction.programs import ProgramError, output_of

_PREFIX, _CODE = "visual_grpo_reproduce_", "code"
_IN_USE = "in_use"
"""A file in the temporary folder, locked by the processes that work there; what is kept has none."""
_NO_HOOKS = ("-c", "core.hooksPath=/dev/null")
"""Hooks of the user's repository, such as DVC's checkout, would run in the worktree too."""


@dataclass
class Place:
    """The temporary folder of one reproduction."""

    folder: Path
    code: Path
    """The project at the run's commit, within the worktree."""
    descriptor: int
    """An open file: a process that inherits it holds the folder too."""
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

    What a reproduction that was killed has left is removed first, with a line in ``note``.

    Raises:
        UserError: there is no such commit, or the patch does not apply.
    """
    check_commit(project, commit)
    _remove_left(project, note)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    tree, prefix = folder / _CODE, git(project, "rev-parse", "--show-prefix")
    in_use = (folder / _IN_USE).open("w")
    fcntl.flock(in_use, fcntl.LOCK_EX)
    place = Place(folder, tree / prefix, in_use.fileno())
    try:
        git(project, *_NO_HOOKS, "worktree", "add", "--quiet", "--detach", tree, commit)
        _apply(tree, folder / "changes.diff", changes)
        yield place
    except ProgramError as error:
        raise UserError(f"git could not check out {commit} into {tree}: {error}") from error
    finally:
        in_use.close()
        if place.kept:
            (folder / _IN_USE).unlink()
            note(f"Kept: {folder} (to remove it: rm -r {folder} && git worktree prune)")
        else:
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(ProgramError):
                git(project, "worktree", "prune")


def _remove_left(project: Path, note: Callable[[str], None]) -> None:
    """Removes the worktrees of reproductions whose processes have all ended without doing so."""
    for line in git(project, "worktree", "list", "--porcelain").splitlines():
        tree = Path(line.removeprefix("worktree "))
        folder = tree.parent
        if tree.name == _CODE and folder.name.startswith(_PREFIX) and _is_left(folder / _IN_USE):
            shutil.rmtree(folder, ignore_errors=True)
            note(f"Removed {folder}, which a reproduction that was killed had left")
    git(project, "worktree", "prune")


def _is_left(in_use: Path) -> bool:
    try:
        with in_use.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:  # There is none, or somebody holds it.
        return False


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
