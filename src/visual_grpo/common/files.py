"""Files and folders that are replaced whole or not at all, and the lock of a folder.

A folder's new content is written into a draft, a hidden sibling, which takes the place of the old folder by two
renames. An error or Ctrl-C leaves the old folder unchanged. A process killed between the two renames leaves
the old folder hidden; `settled` puts it back, so readers take their paths from it.
"""

from __future__ import annotations

import atexit
import csv
import errno
import glob
import itertools
import os
import shutil
import socket
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from filelock import lock_descriptor

from visual_grpo.common import console
from visual_grpo.common.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

_DRAFT = ".draft-"
"""Separates the final name from a random number. A process id does not do: two containers may use the same one."""
_drafts: dict[Path, int | None] = {}
"""Drafts of this process, which are removed when it ends, and the open files that lock them (`_lock`)."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
_held: list[TextIO] = []
_UMASK = os.umask(0o077)  # There is no other way to read it.
os.umask(_UMASK)


def write_atomically(file: Path, content: str | bytes) -> None:
    """Replaces ``file`` in one step, flushed to disk; its folder is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        flush(draft)
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)
    flush(file.parent)


def write_csv(file: Path, table: pd.DataFrame, *, index: bool = False) -> None:
    """Writes a table for people. Text that a spreadsheet would run as a formula gets an apostrophe in front.

    Source: OWASP, CSV Injection. Do not use it for files that a program reads back.
    """
    safe = table.map(_as_text).rename(columns=_as_text, index=_as_text)
    # Without quotes, a carriage return in a text would begin a row.
    safe.to_csv(file, index=index, quoting=csv.QUOTE_NONNUMERIC)


def _as_text(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell


def flush(path: Path) -> None:
    """Waits until a file, or the list of a folder's files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class InUseError(UserError):
    """Another command holds a lock."""


def hold(file: Path) -> int:
    """Takes the lock ``file`` for this process; `release` or the end of the process gives it back.

    Returns the open file. Programs that inherit it hold the lock, too, until the last of them has ended.

    Raises InUseError, or UserError where the lock cannot be written; nothing has been changed then.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = file.absolute().open("a+", encoding="utf-8")
        is_free, is_there = _take(lock), os.fstat(lock.fileno()).st_nlink > 0
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}. Write elsewhere with output=FOLDER") from error
    lock.seek(0)
    if not is_free:
        with lock:
            raise InUseError(
                f"{file.parent} is in use by another command, {lock.read() or 'process unknown'}: {file} is locked."
                " Wait until the command and what it has started end, stop them, or write elsewhere with output=FOLDER"
            )
    if not is_there:  # The last holder has just removed it.
        lock.close()
        return hold(file)
    lock.truncate()
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    _held.append(lock)
    return lock.fileno()


def _take(lock: TextIO) -> bool:
    """Locks the open file; returns False where another command holds it."""
    try:
        return lock_descriptor(lock.fileno(), blocking=False)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        console.note(f"Warning: the disk of {lock.name} has no file locks. Run one command at a time in this folder.")
        return True


def release() -> None:
    """Gives back all locks that this process holds."""
    while _held:
        with _held.pop() as lock, suppress(OSError):
            Path(lock.name).unlink()


@contextmanager
def fresh_folder(final: Path) -> Iterator[Path]:
    """Yields an empty folder next to ``final``, which it replaces when the block ends without an error."""
    draft = new_folder(final)
    try:
        yield draft
        replace_folder(draft, final)
    finally:
        _remove(draft)


def new_draft(final: Path, make: Callable[[Path], object] = Path.touch) -> Path:
    """Makes an empty hidden file next to ``final`` for its next content.

    Left-over drafts are removed when the process ends; drafts of killed processes are removed now, unless the disk has
    no locks of folders, as over NFS.
    """
    final = linked(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    heal(final)
    for draft in final.parent.glob(f".{glob.escape(final.name)}{_DRAFT}*"):
        if (lock := _lock(draft)) is not None:
            _remove(draft)
            os.close(lock)
    number = uuid.uuid4().hex
    draft, unlocked = final.with_name(f".{final.name}{_DRAFT}{number}"), final.with_name(f".{final.name}.{number}")
    make(unlocked)
    _drafts[draft] = _lock(unlocked)
    return unlocked.rename(draft)


def new_folder(final: Path) -> Path:
    """Makes an empty hidden folder next to ``final`` for a node to fill; a `FolderDataset` moves it to its place."""
    return new_draft(final, Path.mkdir)


def replace_folder(fresh: Path, final: Path) -> None:
    """Moves ``fresh`` to ``final``, on the same disk, in the place of what is there."""
    final = linked(final)
    heal(final)
    for file in filter(Path.is_file, fresh.rglob("*")):
        follow_umask(file)
    final.parent.mkdir(parents=True, exist_ok=True)
    try:
        while True:
            if final.exists():
                final.rename(_previous(final))
            try:
                fresh.rename(final)
                return
            except OSError as error:  # A reader has put the old folder back between the two renames.
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
    finally:
        heal(final)


def follow_umask(file: Path) -> None:
    """Lets other users read a file as usual: safetensors lets only the owner read its files."""
    file.chmod(file.stat().st_mode | 0o666 & ~_UMASK)


def heal(final: Path) -> None:
    """After an interrupted replacement: puts the old folder back, or removes it if the new one is in place."""
    final = linked(final)
    previous = _previous(final)
    with suppress(OSError):  # Another process was faster, or the disk can only be read.
        if not previous.exists():
            return
        if final.exists():
            shutil.rmtree(previous, ignore_errors=True)
        else:
            previous.rename(final)


def settled(path: Path) -> Path:
    """Returns ``path``, for reading: puts back what an interrupted replacement has hidden, the path or a folder above.

    Removes nothing, since a user may have named the path.
    """
    with suppress(OSError):  # Who reads it will say what is wrong.
        missing = [*itertools.takewhile(lambda part: not part.exists(), (path, *path.parents))]
        for part in reversed(missing):
            if not part.exists():  # Within a folder that was put back just now.
                heal(part)
    return path


def from_here(path: Path) -> Path:
    """Returns a path in the working directory relative to it; any other as it is."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def linked(path: Path) -> Path:
    """Resolves a link, such as to a bigger disk: the folder is replaced, not the link."""
    return path.resolve() if path.is_symlink() else path


def walk(root: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walks like `os.walk`, also behind links to folders, each folder once."""
    seen = set()
    for base, folders, files in os.walk(root, followlinks=True):
        if (real := os.path.realpath(base)) in seen:
            folders.clear()
            continue
        seen.add(real)
        yield base, folders, files


def file_in(folder: Path, name: str) -> Path:
    """Returns the file that a list in ``folder`` names.

    Raises UserError if it lies outside the folder, also by a link, or is not an ordinary file.
    """
    file = folder / name
    with suppress(ValueError):  # The name has a NUL character.
        if Path(os.path.realpath(file)).is_relative_to(folder.resolve()) and file.is_file():
            return file
    raise UserError(f"{folder} names {name!r}. Expected an ordinary file in this folder.")


def find_link(folder: Path) -> Path | None:
    """Returns the first link, pipe, socket or device in ``folder``; None if it has only files and folders.

    ``folder`` itself may be a link.
    """
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            return path
    return None


def require_no_links(folder: Path) -> None:
    """Raises UserError if ``folder`` holds a link, pipe or device, which a copy would follow out of the folder."""
    if (found := find_link(folder)) is not None:
        kind = "a link" if found.is_symlink() else "a pipe, socket or device"
        raise UserError(
            f"{found} is {kind}. Expected only files and folders, because a copy of {folder} would hold what it leads"
            " to. Put the file itself in its place, or remove it."
        )


def _previous(final: Path) -> Path:
    """Path of the old folder between the two renames."""
    return final.with_name(f".{final.name}.previous")


def _remove(draft: Path) -> None:
    if draft.is_dir():
        shutil.rmtree(draft, ignore_errors=True)
    else:
        draft.unlink(missing_ok=True)
    if (lock := _drafts.pop(draft, None)) is not None:
        os.close(lock)


@atexit.register
def _remove_drafts() -> None:
    for draft in [*_drafts]:
        _remove(draft)


def _lock(draft: Path) -> int | None:
    """Opens and locks a draft; returns None where a living process has locked it, or the disk has no locks."""
    with suppress(OSError):
        descriptor = os.open(draft, os.O_RDONLY)
        with suppress(OSError):
            if lock_descriptor(descriptor, blocking=False):
                return descriptor
        os.close(descriptor)
    return None
