"""``python -m tests.fault_cases [WORD ...]``: plants all faults and writes docs/faults.md.

With words, only the faults in whose description one of them occurs; they are printed, and the page stays as it is.
``--rows=FILE`` writes the rows as JSON instead, for the test.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.fault_cases import THEMES, disk
from tests.fault_cases.fault import Fault, Row
from tests.fault_cases.observe import observed
from tests.fault_cases.page import PAGE, page
from tests.fault_cases.world import World


def main(arguments: list[str]) -> None:
    words = [word for word in arguments if not word.startswith("--rows=")]
    disks = _has_disks()
    faults = [
        fault
        for theme in THEMES.values()
        for fault in theme
        if (not fault.needs_disk or disks) and (not words or any(word in fault.what for word in words))
    ]
    # Not a TemporaryDirectory: it would be removed at the end of each fork.
    folder = Path(tempfile.mkdtemp()).resolve()
    world = World(folder)
    rows = _by_two(faults, world, folder) if disks and len(faults) > 1 else _all(faults, world)
    disk.unmount_all(folder)
    shutil.rmtree(folder)
    for argument in arguments:
        if argument.startswith("--rows="):
            Path(argument.removeprefix("--rows=")).write_text(json.dumps([asdict(row) for row in rows.values()]))
    if not arguments:
        assert disks, "this system lets no process mount a disk: rows of the page would be missing"
        PAGE.write_text(
            page({name: [rows[fault.what] for fault in theme] for name, theme in THEMES.items()}), encoding="utf-8"
        )


def _all(faults: Sequence[Fault], world: World) -> dict[str, Row]:
    rows = {}
    for fault in faults:
        began = time.monotonic()
        rows[fault.what] = observed(fault, world)
        print(f"{time.monotonic() - began:5.1f} s {rows[fault.what]}", flush=True)  # noqa: T201
    return rows


def _by_two(faults: Sequence[Fault], world: World, folder: Path) -> dict[str, Row]:
    """Every second fault in another process, which sees a copy of the folder in its place."""
    copy = Path(shutil.copytree(folder, f"{folder}-copy", symlinks=True))
    answer = copy.with_name(f"{copy.name}.json")
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            disk.own_mounts()
            disk.show(copy, folder)
            answer.write_text(json.dumps([asdict(row) for row in _all(faults[1::2], world).values()]))
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    rows = _all(faults[::2], world)
    assert os.waitpid(pid, 0)[1] == 0, "the other process has failed"
    rows |= {values["what"]: Row(**values) for values in json.loads(answer.read_text(encoding="utf-8"))}
    shutil.rmtree(copy)
    answer.unlink()
    return rows


def _has_disks() -> bool:
    try:
        disk.own_mounts()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
