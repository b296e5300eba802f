"""A real MLflow database for each test, and what a run left in it."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlflow
import pytest

from visual_grpo.common import quiet_libraries
from visual_grpo.tracking import tracker
from visual_grpo.tracking.adapter_lookup import Registered
from visual_grpo.tracking.tracker import Tracker

EXPERIMENT = "visual_grpo"


class Project:
    """A folder with a database and outputs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.database = folder, folder / "mlflow.db"
        self.uri = f"sqlite:///{self.database}"
        self.output = folder / "data"
        self.said: list[str] = []

    def start(self, earlier: str | None = None, name: str = "ar seed 0") -> Tracker:
        mlflow.set_tracking_uri(self.uri)
        return Tracker.start(name, self.output, self.said.append, earlier=earlier)

    @property
    def client(self) -> mlflow.MlflowClient:
        return mlflow.MlflowClient(self.uri)

    def run(self, run_id: str | None) -> mlflow.entities.Run:
        return self.client.get_run(str(run_id))

    def runs(self) -> list[mlflow.entities.Run]:
        return list(self.client.search_runs([self.experiment]))

    @property
    def experiment(self) -> str:
        found = self.client.get_experiment_by_name(EXPERIMENT)
        assert found is not None
        return str(found.experiment_id)

    def curve(self, run_id: str | None, metric: str) -> list[tuple[int, float]]:
        """Steps and values, as often as they are there."""
        return sorted((point.step, point.value) for point in self.client.get_metric_history(str(run_id), metric))

    def artifacts(self, run_id: str | None) -> dict[str, bytes]:
        """The path of each artifact and its content."""
        folder = Path(self.run(run_id).info.artifact_uri.removeprefix("file://"))
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def pictures(self, run_id: str | None) -> list[str]:
        """Series and step of the images, as often as they are there."""
        names = [Path(name) for name in self.artifacts(run_id) if name.startswith("images/")]
        return sorted(name.name.split("+timestamp")[0] for name in names if name.suffix == ".png")


def files_of(version: Registered) -> Path:
    """The folder of a version's files."""
    location = mlflow.MlflowClient().get_model_version_download_uri(version.name, str(version.version))
    return Path(location.removeprefix("file://"))


@contextmanager
def crash(monkeypatch: pytest.MonkeyPatch, method: str, after: bool) -> Iterator[None]:
    """Kills the command just before or just after a call of MLflow's client has done what it was asked."""
    real, calls = getattr(mlflow.MlflowClient, method), itertools.count()

    def dies(*arguments: Any, **named: Any) -> Any:
        is_due = not next(calls)
        if is_due and not after:
            raise SystemExit
        answer = real(*arguments, **named)
        if is_due:
            raise SystemExit
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, method, dies)
        yield


@pytest.fixture
def project(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    for name, value in quiet_libraries._ENVIRONMENT.items():  # As `kedro run` sets them.
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tracker, "WAIT", 60.0)  # On a busy machine a slow answer would be told as an outage.
    project = Project(tmp_path)
    before = mlflow.get_tracking_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", project.uri)
    monkeypatch.setenv("MLFLOW_RUN_ID", "")  # Restored after the test, whatever runs were left open.
    monkeypatch.delenv("MLFLOW_RUN_ID")
    mlflow.set_tracking_uri(project.uri)
    yield project
    Tracker.active().end("FAILED")
    mlflow.set_tracking_uri(before)
