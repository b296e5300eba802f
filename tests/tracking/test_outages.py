"""MLflow locked, read-only, deleted or dead during a training: one line, no wait, and afterwards everything once."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing

import mlflow
import pytest

from tests.tracking.conftest import Project
from tests.tracking.test_sync import STEPS, Results, complete
from visual_grpo.tracking import tracker

Undo = Callable[[], object]


def locked(project: Project) -> Undo:
    other = sqlite3.connect(project.database, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN EXCLUSIVE")
    return other.close


def read_only(project: Project) -> Undo:
    with closing(sqlite3.connect(project.database, isolation_level=None)) as other:
        other.execute("CREATE TRIGGER refuse BEFORE INSERT ON metrics BEGIN SELECT RAISE(ABORT, 'readonly'); END")

    def undo() -> None:
        with closing(sqlite3.connect(project.database, isolation_level=None)) as other:
            other.execute("DROP TRIGGER refuse")

    return undo


def deleted(project: Project) -> Undo:
    aside = project.database.rename(project.folder / "aside.db")
    return lambda: aside.replace(project.database)


def dead(project: Project) -> Undo:
    project.uri = "http://127.0.0.1:9"
    return lambda: setattr(project, "uri", f"sqlite:///{project.database}")


@pytest.mark.slow
@pytest.mark.parametrize("fault", [locked, read_only, deleted, dead])
def test_a_training_logs_on_and_sync_adds_what_is_missing(
    project: Project, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Project], Undo]
) -> None:
    monkeypatch.setattr(tracker, "WAIT", 5.0)
    monkeypatch.setattr(tracker, "PAUSE", 1.0)
    undo = fault(project) if fault is dead else None
    log = project.start()
    log.metrics({"reward/total": 0.1}, 1)
    time.sleep(3)
    undo = undo or fault(project)
    began = time.monotonic()
    for step in range(2, STEPS + 1):
        log.metrics({"reward/total": step / 10}, step)
    assert time.monotonic() - began < 0.1
    time.sleep(2)
    results = Results(project, str(log.run_id))
    log.end("FINISHED")
    undo()
    [said] = project.said
    assert "fails: " in said
    assert "make sync" in said
    mlflow.set_tracking_uri(project.uri)
    for _ in range(2):
        results.sync()
        complete(results.in_mlflow())
    assert project.curve(project.runs()[0].info.run_id, "reward/total") == [(s, s / 10) for s in range(1, STEPS + 1)]
