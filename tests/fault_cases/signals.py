"""Signals: the user's Ctrl-C, a batch system's SIGTERM, the kernel's SIGKILL, a terminal that is closed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.fault_cases import forked
from tests.fault_cases.fault import RESUME, TRAIN, Fault, gets, once

CHECKPOINTS = Path("data/06_models/checkpoints")


def after_a_checkpoint(project: Path, printed: str) -> bool:
    """The new training has written its first; those before are aside."""
    return (project / "data/06_models/checkpoints.previous").is_dir() and (
        project / CHECKPOINTS / "step-000001/SHA256SUMS"
    ).is_file()


def twice(project: Path, pid: int) -> None:
    """The second as soon as the first was noticed."""
    os.kill(pid, signal.SIGINT)
    while "Stopping" not in forked.printed(project):
        time.sleep(0.01)
    os.kill(pid, signal.SIGINT)


FAULTS = (
    Fault(
        what="Ctrl-C in a training",
        run=TRAIN,
        moment=(after_a_checkpoint, gets(signal.SIGINT)),
        says="Go on with: ",
        then=RESUME,
    ),
    Fault(
        what="SIGTERM in a training, as at a batch system's time limit",
        run=TRAIN,
        moment=(after_a_checkpoint, gets(signal.SIGTERM)),
        says="Go on with: ",
        then=RESUME,
    ),
    Fault(
        what="SIGKILL in a training, as from the kernel when memory runs out",
        run=TRAIN,
        moment=(after_a_checkpoint, gets(signal.SIGKILL)),
        says="",
        then=RESUME,
    ),
    Fault(
        what="SIGHUP in a training, as when its terminal is closed",
        run=TRAIN,
        moment=(after_a_checkpoint, gets(signal.SIGHUP)),
        says="",
        then=RESUME,
    ),
    Fault(what="Ctrl-C twice", run=TRAIN, moment=(after_a_checkpoint, twice), says="Go on with: ", then=RESUME),
    Fault(
        what="Ctrl-C while the baseline is drawn",
        run="--pipeline=baseline --params=evaluation.redraw=true",
        moment=(once("draw_baseline"), gets(signal.SIGINT)),
        says="Stopped.",
    ),
    Fault(
        what="SIGTERM while the trained model is drawn",
        run="--pipeline=evaluate",
        moment=(once("draw_trained"), gets(signal.SIGTERM)),
        says="Stopped.",
    ),
    Fault(
        what="SIGKILL while the trained model is drawn",
        run="--pipeline=evaluate",
        moment=(once("draw_trained"), gets(signal.SIGKILL)),
        says="",
    ),
)
