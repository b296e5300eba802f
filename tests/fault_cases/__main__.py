"""``python -m tests.fault_cases [WORD ...]``: plants all faults and writes docs/faults.md.

With words, only the faults in whose description one of them occurs; they are printed, and the page stays as it is.
``--rows=FILE`` writes the rows as JSON instead, for the test.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from tests.fault_cases import THEMES, disk
from tests.fault_cases.fault import Row
from tests.fault_cases.observe import observed
from tests.fault_cases.page import PAGE, page
from tests.fault_cases.world import World


def main(arguments: list[str]) -> None:
    words = [word for word in arguments if not word.startswith("--rows=")]
    disks = _has_disks()
    # Not a TemporaryDirectory: it would be removed at the end of each fork.
    folder = Path(tempfile.mkdtemp()).resolve()
    world = World(folder)
    themes: dict[str, list[Row]] = {}
    for theme, faults in THEMES.items():
        for fault in faults:
            if (not fault.needs_disk or disks) and (not words or any(word in fault.what for word in words)):
                began = time.monotonic()
                row = observed(fault, world)
                print(f"{time.monotonic() - began:5.1f} s {row}", flush=True)  # noqa: T201
                themes.setdefault(theme, []).append(row)
    shutil.rmtree(folder)
    rows = [asdict(row) for found in themes.values() for row in found]
    for argument in arguments:
        if argument.startswith("--rows="):
            Path(argument.removeprefix("--rows=")).write_text(json.dumps(rows), encoding="utf-8")
    if not arguments:
        assert disks, "this system lets no process mount a disk: rows of the page would be missing"
        PAGE.write_text(page(themes), encoding="utf-8")


def _has_disks() -> bool:
    try:
        disk.own_mounts()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
