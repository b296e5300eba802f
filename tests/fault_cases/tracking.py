"""MLflow away, locked, without permission or damaged: no training may end or lose a row by that."""

from __future__ import annotations

import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tests.fault_cases.fault import TRAIN, Fault, once
from tests.fault_cases.forked import DELIVER

AWAY = "MLflow ("
SERVERS = DEAD, SILENT = "http://127.0.0.1:9", "http://127.0.0.1:18766"
ASIDE = "aside.db"


@contextmanager
def locked(project: Path) -> Iterator[None]:
    with closing(sqlite3.connect(project / "mlflow.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield


@contextmanager
def silent_server(project: Path) -> Iterator[None]:
    """Takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 18766)):
        yield


def moved_away(project: Path, pid: int) -> None:
    (project / "mlflow.db").rename(project / ASIDE)


def moved_back(project: Path) -> None:
    (project / ASIDE).replace(project / "mlflow.db")


def server_is_the_database(project: Path) -> None:
    """What waits for a server goes to the database that is behind it."""
    for head in project.glob("data/mlflow_spool/*/run.json"):
        text = head.read_text(encoding="utf-8")
        for server in SERVERS:
            text = text.replace(server, f"sqlite:///{project / 'mlflow.db'}")
        head.write_text(text, encoding="utf-8")


FAULTS = (
    Fault(what="The database is locked during the whole run", beside=locked, run=TRAIN, says=AWAY, then=DELIVER),
    Fault(
        what="The database may not be written",
        edit=lambda project: (project / "mlflow.db").chmod(0o444),
        run=TRAIN,
        says=AWAY,
        repair=lambda project: (project / "mlflow.db").chmod(0o644),
        then=DELIVER,
    ),
    Fault(
        what="The database disappears during the run",
        run=TRAIN,
        moment=(once("== 1 of 1: train"), moved_away),
        says=AWAY,
        repair=moved_back,
        then=DELIVER,
    ),
    Fault(
        what="The database is no database",
        edit=lambda project: (project / "mlflow.db").write_bytes(b"no database " * 1000),
        run=TRAIN,
        says=AWAY,
        repair=lambda project: (project / "mlflow.db").unlink(),
        then=DELIVER,
    ),
    Fault(
        what="No server is at the address",
        run=TRAIN,
        environment={"MLFLOW_TRACKING_URI": DEAD},
        says=AWAY,
        repair=server_is_the_database,
        then=DELIVER,
    ),
    Fault(
        what="The server takes connections and never answers",
        beside=silent_server,
        run=TRAIN,
        environment={"MLFLOW_TRACKING_URI": SILENT},
        says=AWAY,
        repair=server_is_the_database,
        then=DELIVER,
    ),
    Fault(
        what="The folder of artifacts may not be written",
        edit=lambda project: (project / "mlartifacts").chmod(0o555),
        run=TRAIN,
        says=AWAY,
        repair=lambda project: (project / "mlartifacts").chmod(0o755),
        then=DELIVER,
    ),
)
