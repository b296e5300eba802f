"""A project whose folder is moved or copied keeps its artifacts to itself."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest

from visual_grpo.errors import UserError
from visual_grpo.tracking.relocation import default_artifacts, follow_project, use_server
from visual_grpo.tracking.runs_table import address


def uri(project: Path) -> str:
    return f"sqlite:///{project / 'mlflow.db'}"


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """With a run that has an artifact and a model, and an experiment elsewhere."""
    folder, before, here = tmp_path / "project", mlflow.get_tracking_uri(), Path.cwd()
    folder.mkdir()
    os.chdir(folder)
    mlflow.set_tracking_uri(uri(folder))
    client = mlflow.MlflowClient()
    client.create_experiment("elsewhere", artifact_location="s3://bucket/mlartifacts")
    experiment = client.create_experiment("visual_grpo", artifact_location="mlartifacts")
    with mlflow.start_run(experiment_id=experiment, run_name="a run"):
        mlflow.log_text("of the run", "file.txt")
    client.create_logged_model(experiment, name="adapter")
    yield folder
    mlflow.set_tracking_uri(before)
    os.chdir(here)


def text_of_the_run(folder: Path) -> str:
    mlflow.set_tracking_uri(uri(folder))
    [run] = mlflow.search_runs(search_all_experiments=True, output_format="list")
    return mlflow.artifacts.load_text(f"{run.info.artifact_uri}/file.txt")


def test_a_copy_reads_and_writes_its_own_artifacts(project: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(project, copy)
    assert follow_project(uri(copy), copy) == 3
    assert follow_project(uri(copy), copy) == 0
    [file] = (copy / "mlartifacts").rglob("file.txt")
    file.write_text("of the copy")
    assert text_of_the_run(copy) == "of the copy"
    assert text_of_the_run(project) == "of the run"
    elsewhere = mlflow.MlflowClient(uri(copy)).get_experiment_by_name("elsewhere")
    assert elsewhere is not None
    assert elsewhere.artifact_location.startswith("s3://")


def test_a_moved_project_finds_its_artifacts(project: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved" / "deeper"
    moved.parent.mkdir()
    os.chdir(tmp_path)
    project.rename(moved)
    follow_project(uri(moved), moved)
    assert text_of_the_run(moved) == "of the run"


def test_where_it_is_nothing_changes(project: Path, tmp_path: Path) -> None:
    before = sqlite3.connect(project / "mlflow.db").execute("SELECT artifact_uri FROM runs").fetchall()
    assert follow_project(uri(project), project) == 0
    assert follow_project("http://somewhere", project) == 0
    assert follow_project(uri(project), tmp_path) == 0, "a database that belongs to another folder"
    assert sqlite3.connect(project / "mlflow.db").execute("SELECT artifact_uri FROM runs").fetchall() == before


def test_the_address_sorts_by_the_gain() -> None:
    assert address("7") == (
        "http://127.0.0.1:5000/#/experiments/7/runs?orderByKey=metrics.%60result%2Fgain%60&orderByAsc=false"
    )


@pytest.mark.parametrize(
    ("server", "location", "expected"),
    [
        ("sqlite:///mlflow.db", "mlartifacts", "file:///project/mlartifacts"),
        ("postgresql://host/db", "mlartifacts", "file:///project/mlartifacts"),
        ("http://host:5000", "mlartifacts", None),
        ("https://host", "s3://bucket/x", "s3://bucket/x"),
        ("sqlite:///mlflow.db", None, None),
    ],
)
def test_a_server_keeps_its_artifacts_itself(server: str, location: str | None, expected: str | None) -> None:
    """In a folder of this machine no other one would find them."""
    assert default_artifacts(server, location, Path("/project")) == expected


@pytest.mark.parametrize("address", ["ftp://user:secret@host/mlflow", "htps://host"])
def test_an_address_of_a_kind_that_mlflow_does_not_know_is_refused_at_once(address: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"begins with (ftp|htps)://, which MLflow does not know") as raised:
        use_server(address, tmp_path)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("address", ["postgresql+psycopg://nowhere/mlflow", "http://127.0.0.1:1", "databricks"])
def test_no_server_is_asked_when_it_is_named(address: str, tmp_path: Path) -> None:
    before = mlflow.get_tracking_uri()
    use_server(address, tmp_path)
    assert mlflow.get_tracking_uri() == address
    mlflow.set_tracking_uri(before)
