"""Small disks of this process's own: mounted where nobody else sees them, gone with the process."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_RECURSIVE, _PRIVATE, _READ_ONLY, _REMOUNT, _BIND, _DETACH = 1 << 14, 1 << 18, 1, 32, 4096, 2


def own_mounts() -> None:
    """Lets this process, which must have a single thread, mount disks. Raises OSError where the system forbids it."""
    if sys.platform != "linux":
        raise OSError("only Linux has mounts of a process's own")
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _NEW_MOUNTS | (0 if user == 0 else _NEW_USER))
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _call("mount", b"none", b"/", None, _RECURSIVE | _PRIVATE, None)


def mount(folder: Path, kilobytes: int) -> None:
    """An empty disk of this size."""
    folder.mkdir(exist_ok=True)
    _call("mount", b"tmpfs", bytes(folder), b"tmpfs", 0, f"size={kilobytes}k".encode())


def show(folder: Path, place: Path) -> None:
    """Lets this process find the content of a folder in another place too, instead of what is there."""
    _call("mount", bytes(folder), bytes(place), None, _BIND, None)


def resize(folder: Path, kilobytes: int) -> None:
    _call("mount", b"tmpfs", bytes(folder), b"tmpfs", _REMOUNT, f"size={kilobytes}k".encode())


def set_read_only(folder: Path) -> None:
    _call("mount", b"tmpfs", bytes(folder), b"tmpfs", _REMOUNT | _READ_ONLY, None)


def unmount_all(folder: Path) -> None:
    """Takes away every disk that was mounted in the folder."""
    if sys.platform == "linux":
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8")
        for line in reversed(mounts.splitlines()):
            if Path(line.split()[1]).is_relative_to(folder):
                _call("umount2", line.split()[1].encode(), _DETACH)


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
