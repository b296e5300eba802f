"""Which packages another lock file has: ``lock_changes.py BEFORE AFTER`` prints them as a table in Markdown."""

from __future__ import annotations

import re
import sys
from pathlib import Path

PINNED = re.compile(r"^([\w.-]+(?:\[[\w,.-]+\])?)==([^\s;\\]+)", re.MULTILINE)


def versions(lock: str) -> dict[str, list[str]]:
    """Package -> its versions, of which a lock for several platforms may have more than one."""
    found: dict[str, list[str]] = {}
    for name, version in PINNED.findall(lock):
        found.setdefault(name, []).append(version)
    return found


def table(before: str, after: str) -> str:
    """Empty if nothing has changed."""
    old, new = versions(before), versions(after)
    names = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    rows = [f"| {name} | {', '.join(old.get(name, ['-']))} | {', '.join(new.get(name, ['-']))} |\n" for name in names]
    return "| package | from | to |\n|---|---|---|\n" + "".join(rows) if rows else ""


if __name__ == "__main__":
    sys.stdout.write(table(*(Path(file).read_text(encoding="utf-8") for file in sys.argv[1:3])))
