"""One command at a time writes into a folder: a lock that says who holds it.

The operating system holds the lock and lets go of it when its process ends, however that ends. Beside it a JSON file
names the holder. Where several machines share a file system, the locks of one may be unseen by another; the file is
what keeps them apart.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from visual_grpo.errors import UserError
from visual_grpo.folders import is_running

_held: list[tuple[FileLock, Path]] = []
"""By this process, with the file that says so."""


@dataclass(frozen=True)
class Holder:
    """Who holds a lock."""

    pid: int
    host: str
    boot: str
    """Differs after each start of the machine, and is the same in all of its containers; "" where it is not known."""
    since: str
    """ISO 8601, UTC."""
    command: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}: {self.command}"

    def is_of_this_machine(self) -> bool:
        return self.host == socket.gethostname() or (self.boot != "" and self.boot == _boot())


def hold(file: Path, command: str, note: Callable[[str], None]) -> None:
    """Takes the lock ``file`` for this process; `release` gives it back.

    A lock whose process has ended is taken over, with a line in ``note``.

    Args:
        command: of this process, to be shown to others.

    Raises:
        UserError: another process holds it; nothing has been changed then.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    said = file.with_name(f"{file.name}.json")
    lock = FileLock(file)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise UserError(_refusal(file.parent, _read(said))) from None
    before = _read(said)
    if before is not None and not before.is_of_this_machine():
        lock.release()
        raise UserError(
            f"{_refusal(file.parent, before)} Whether it still runs cannot be seen from {socket.gethostname()}: if it"
            f" does not, delete {said}"
        )
    if before is not None:
        note(f"{file.parent} was in use by a command that was killed ({before}): going on in its place")
    _write(
        said, Holder(os.getpid(), socket.gethostname(), _boot(), datetime.now(UTC).isoformat(" ", "seconds"), command)
    )
    _held.append((lock, said))


def descriptors() -> tuple[int, ...]:
    """The open files of all locks that this process holds: a process that inherits one holds its lock too."""
    found = [lock._context.lock_file_fd for lock, _ in _held]
    return tuple(number for number in found if number is not None)


def release() -> None:
    """Gives back all locks that this process holds."""
    while _held:
        lock, said = _held.pop()
        said.unlink(missing_ok=True)
        lock.release()


def _refusal(folder: Path, holder: Holder | None) -> str:
    who = "another process" if holder is None else str(holder)
    ended = ""
    if holder is not None and holder.is_of_this_machine() and not is_running(holder.pid):
        ended = f" Process {holder.pid} has ended, but one that it started still runs; end that one too."
    return (
        f"{folder} is in use by {who}\nTwo commands that write into one folder would replace each other's results."
        f"{ended} Wait until that one ends, stop it, or write elsewhere with output=FOLDER."
    )


def _read(said: Path) -> Holder | None:
    """What the file says; None if there is none, or half of one."""
    try:
        return Holder(**json.loads(said.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _write(said: Path, holder: Holder) -> None:
    draft = said.with_name(f"{said.name}.{holder.pid}")
    draft.write_text(json.dumps(asdict(holder)), encoding="utf-8")
    draft.replace(said)


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # Not Linux.
        return ""
