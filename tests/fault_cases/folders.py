"""Two commands in one folder."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path

from tests.fault_cases import forked
from tests.fault_cases.fault import TRAIN, Fault, once

ENDLESS = "--pipeline=train --params=grpo.steps=500"


def a_training(project: Path) -> AbstractContextManager[None]:
    return forked.running(ENDLESS, project, once("== 1 of 1: train"))


def a_killed_training(project: Path) -> None:
    with a_training(project):
        pass


def a_holder_elsewhere(project: Path) -> None:
    holder = {
        "pid": 1,
        "host": "node7",
        "boot": "another",
        "since": "2026-01-01 00:00:00+00:00",
        "command": "kedro run",
    }
    (project / "data/.lock.json").write_text(json.dumps(holder), encoding="utf-8")


FAULTS = (
    Fault(what="Another training writes into the folder", beside=a_training, run=TRAIN),
    Fault(what="The baseline is drawn again during a training", beside=a_training, run="--pipeline=baseline"),
    Fault(
        what="The training before was killed and has left its lock",
        edit=a_killed_training,
        run=TRAIN,
        says="data was in use",
    ),
    Fault(what="A process of another machine holds the lock", edit=a_holder_elsewhere, run=TRAIN),
)
