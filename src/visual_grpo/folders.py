"""Folders that are replaced whole or not at all.

The new content is written into a draft, a hidden sibling, which takes the place of the old folder by two renames:
a crash, an error or Ctrl-C leaves the old folder as it was, and a kill between the renames is undone by `heal`.
"""

from __future__ import annotations

import atexit
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DRAFT = ".draft-"
"""Between the final name and the process that writes it."""

_drafts: set[Path] = set()
"""Of this process; those still there when it ends are removed."""


@contextmanager
def fresh_folder(final: Path) -> Iterator[Path]:
    """Gives an empty folder beside ``final``, which it replaces when the block ends without an error."""
    draft = new_draft(final)
    draft.mkdir()
    try:
        yield draft
        replace_folder(draft, final)
    finally:
        _remove(draft)


def new_draft(final: Path) -> Path:
    """A path beside ``final`` for its next content; nothing is there yet.

    What is not moved away is removed when the process ends; drafts of processes that were killed are removed now.
    """
    final = linked(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    heal(final)
    for draft in final.parent.glob(f".{glob.escape(final.name)}{_DRAFT}*"):
        process = draft.name.rpartition(_DRAFT)[2]
        if process.isdecimal() and (int(process) == os.getpid() or not is_running(int(process))):
            _remove(draft)
    draft = final.with_name(f".{final.name}{_DRAFT}{os.getpid()}")
    _drafts.add(draft)
    return draft


def final_of(draft: Path) -> Path:
    """What a path of `new_draft` will replace."""
    return draft.with_name(draft.name.removeprefix(".").rpartition(_DRAFT)[0])


def replace_folder(fresh: Path, final: Path) -> None:
    """Moves ``fresh`` to ``final``, in the place of what is there; from another disk it is copied first."""
    final = linked(final)
    heal(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    if fresh.stat().st_dev != final.parent.stat().st_dev:
        with fresh_folder(final) as draft:
            shutil.copytree(fresh, draft, dirs_exist_ok=True)
        shutil.rmtree(fresh)
        return
    if final.exists():
        final.rename(_previous(final))
    try:
        fresh.rename(final)
    finally:
        heal(final)


def heal(final: Path) -> None:
    """After an interrupted replacement: puts the old folder back, or removes it if the new one is in place."""
    final = linked(final)
    previous = _previous(final)
    if not previous.exists():
        return
    if final.exists():
        shutil.rmtree(previous, ignore_errors=True)
    else:
        previous.rename(final)


def linked(path: Path) -> Path:
    """Where a link leads, such as to a bigger disk: what is replaced is the folder, not the link."""
    return path.resolve() if path.is_symlink() else path


def _previous(final: Path) -> Path:
    """Where the old folder is between the two renames."""
    return final.with_name(f".{final.name}.previous")


def _remove(draft: Path) -> None:
    if draft.is_dir():
        shutil.rmtree(draft, ignore_errors=True)
    else:
        draft.unlink(missing_ok=True)


@atexit.register
def _remove_drafts() -> None:
    for draft in _drafts:
        _remove(draft)


def is_running(process: int) -> bool:
    """Whether a process of this machine has this id."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # It runs, as another user.
        return True
    return True


def walked(folder: Path) -> Iterator[Path]:
    """All files and folders beneath ``folder``, links to folders not followed, in no order.

    What another process removes meanwhile is left out; `Path.rglob` would raise FileNotFoundError.
    """
    for parent, folders, files in os.walk(folder):
        yield from (Path(parent, name) for name in (*folders, *files))
