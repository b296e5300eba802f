"""MLflow locked, read-only, deleted or dead during a training: one line, no wait, and afterwards everything once."""

from __future__ import annotations

import re
import shutil
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import mlflow
import pytest

from tests.tracking.conftest import Project
from tests.tracking.test_sync import STEPS, Results, complete
from visual_grpo.tracking import sync, tracker

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


def experiment_deleted(database: Path) -> str:
    client = mlflow.MlflowClient(uri := f"sqlite:///{database}")
    client.delete_experiment(client.create_experiment("visual_grpo"))
    return uri


def old_schema(database: Path) -> str:
    with closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("UPDATE alembic_version SET version_num = '451aebb31d03'")
    return f"sqlite:///{database}"


def moved(database: Path) -> str:
    uri = f"sqlite:///{database}"
    mlflow.MlflowClient(uri).create_experiment("visual_grpo", "file:///before/mlartifacts")
    return uri


@pytest.mark.parametrize(
    ("address", "said"),
    [
        (old_schema, r"Detected out-of-date database schema .* run 'mlflow db upgrade <database_uri>' to migrate"),
        (experiment_deleted, r"'visual_grpo' was deleted\. .*: mlflow experiments restore --experiment-id 1$"),
        (
            moved,
            r"its artifacts are in file:///before/mlartifacts, where this project was before\. Move mlflow\.db aside$",
        ),
        (
            "postgresql+psycopg2://name:secret@host/x",
            r"No module named 'psycopg2'\. Add the package to requirements-local",
        ),
        ("nosuch://host/x", r"unsupported URI 'nosuch://host/x' .* Supported URI schemes are: "),
        ("mlruns", r"The `mlflow migrate-filestore` tool migrates .* set `MLFLOW_ALLOW_FILE_STORE=true` to opt out"),
    ],
)
def test_an_address_that_cannot_work_is_told_in_one_sentence_with_the_remedy(
    address: str | Callable[[Path], str],
    said: str,
    empty_database: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By `make sync`; a run, promote and a retraining ask by the same functions."""
    monkeypatch.chdir(tmp_path)
    uri = address if isinstance(address, str) else address(Path(shutil.copy(empty_database, tmp_path / "mlflow.db")))
    mlflow.set_tracking_uri(uri)
    project = Project(tmp_path)
    Results(project, "0" * 32)
    monkeypatch.setattr(sys, "argv", ["sync", str(project.output)])
    with pytest.raises(SystemExit) as ended:
        sync.main()
    [line] = capsys.readouterr().out.splitlines()
    assert ended.value.code == 1
    assert line.startswith(f"{project.output}: MLflow (")
    assert re.search(said, line), line
    assert "secret" not in line


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
