"""Full disks, permissions, memory and the other limits of a machine."""

from __future__ import annotations

import os
import resource
import shutil
import time
from pathlib import Path

from tests.fault_cases import disk
from tests.fault_cases.fault import RESUME, TRAIN, Edit, Fault
from tests.fault_cases.forked import DELIVER

DISK = "disk"
ON_DISK = f",tracking.checkpoints={DISK}/checkpoints"
LARGE = 200_000
"""Kilobytes of a disk that is never full."""


def small_disk(kilobytes: int) -> Edit:
    """An empty disk in the folder `DISK`."""
    return lambda project: disk.mount(project / DISK, kilobytes)


def moved_to_a_disk(name: str, free: int) -> Edit:
    """Puts a file or folder on a separate disk, with so many kilobytes free."""

    def edit(project: Path) -> None:
        whole = project / name
        aside = whole.rename(whole.with_name(f"{whole.name}.aside"))
        place = whole if aside.is_dir() else project / DISK
        disk.mount(place, LARGE)
        if aside.is_dir():
            shutil.copytree(aside, place, dirs_exist_ok=True)
        else:
            shutil.copy(aside, place / whole.name)
            whole.symlink_to(place / whole.name)
        used = os.statvfs(place)
        disk.resize(place, (used.f_blocks - used.f_bfree) * used.f_frsize // 1024 + free)

    return edit


def more_space(name: str = DISK) -> Edit:
    return lambda project: disk.resize(project / name, LARGE)


def read_only(project: Path) -> None:
    moved_to_a_disk("data", LARGE)(project)
    disk.set_read_only(project / "data")


def mode(name: str, bits: int) -> Edit:
    return lambda project: (project / name).chmod(bits)


def little_memory() -> None:
    """As much as the process has, and 100 MB more: fewer do not let its threads start."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + 100_000_000
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (10, 10))


def jumping_clock() -> None:
    """The clock of the machine is put an hour back and forth at every look."""
    real, looks = time.time, [0]

    def jumps() -> float:
        looks[0] += 1
        return real() - 3600 * (looks[0] % 2)

    time.time = jumps


FAULTS = (
    Fault(
        what="The disk of the checkpoints is full after the second",
        edit=small_disk(1_200),
        run=TRAIN + ON_DISK,
        needs_disk=True,
        repair=more_space(),
        then=RESUME + ON_DISK,
    ),
    Fault(
        what="The disk of the pictures is full while the baseline is drawn",
        edit=moved_to_a_disk("data/07_model_output", 8),
        run="--pipeline=baseline --params=evaluation.redraw=true",
        needs_disk=True,
    ),
    Fault(
        what="The disk of MLflow's database is full",
        edit=moved_to_a_disk("mlflow.db", 4),
        run=TRAIN,
        needs_disk=True,
        says="MLflow (",
        repair=more_space(),
        then=DELIVER,
    ),
    Fault(
        what="The disk of everything is full",
        edit=moved_to_a_disk("data", 1_000),
        run=TRAIN,
        needs_disk=True,
        repair=more_space("data"),
        then=TRAIN,
    ),
    Fault(what="The disk can only be read", edit=read_only, run=TRAIN, needs_disk=True),
    Fault(
        what="The folder of models may not be written",
        edit=mode("data/06_models", 0o555),
        run=TRAIN,
        repair=mode("data/06_models", 0o755),
        then=TRAIN,
    ),
    Fault(
        what="The records may not be read",
        edit=mode("data/05_model_input/records.parquet", 0),
        run=TRAIN,
        repair=mode("data/05_model_input/records.parquet", 0o644),
        then=TRAIN,
    ),
    Fault(what="No file may have more than 500 kB (`ulimit -f`)", inside=small_files, run=TRAIN),
    Fault(what="No more than 10 files may be open (`ulimit -n`)", inside=few_files, run=TRAIN),
    Fault(what="The process gets only 100 MB more memory (`ulimit -v`)", inside=little_memory, run=TRAIN),
    Fault(what="The clock jumps an hour back and forth", inside=jumping_clock, run=TRAIN, says="Trained 3 steps"),
)
