"""The tracker on a real MLflow store."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest
from PIL import Image

from visual_grpo.tracking import Tracker, run_exists


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One store for the module: making its tables takes seconds."""
    folder = tmp_path_factory.mktemp("mlflow")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    mlflow.MlflowClient(uri).create_experiment("test", artifact_location=(folder / "artifacts").as_uri())
    return uri


@pytest.fixture
def tracker(store: str) -> Iterator[Tracker]:
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(store)
    mlflow.set_experiment("test")
    mlflow.start_run()
    yield Tracker.active()
    mlflow.end_run()
    mlflow.set_tracking_uri(before)


@pytest.fixture
def client(store: str) -> mlflow.MlflowClient:
    return mlflow.MlflowClient(store)


def test_without_a_run_every_call_does_nothing(tmp_path: Path):
    assert mlflow.active_run() is None
    tracker = Tracker.active()
    assert tracker.run_id is None
    tracker.metrics({"a": 1.0}, step=1)
    tracker.image(Image.new("RGB", (4, 4)), "grid", 1)
    tracker.file(tmp_path / "missing")
    tracker.folder(tmp_path / "missing", "x")
    tracker.tags({"a": 1})
    tracker.params({"a": 1})
    tracker.dataset("records", "abc", "data")
    tracker.killed()
    assert mlflow.active_run() is None


def test_metrics_are_there_at_once_step_by_step(tracker, client):
    tracker.metrics({"reward/total": 0.5, "kl": 0.1}, step=1)
    tracker.metrics({"reward/total": 0.75, "kl": math.nan}, step=2)
    history = client.get_metric_history(tracker.run_id, "reward/total")
    assert [(point.step, point.value) for point in history] == [(1, 0.5), (2, 0.75)]
    assert [point.step for point in client.get_metric_history(tracker.run_id, "kl")] == [1, 2]


def test_images_files_and_folders_become_artifacts(tracker, client, tmp_path):
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "page.html").write_text("x")
    tracker.image(Image.new("RGB", (8, 8), "red"), "samples", 3)
    tracker.file(tmp_path / "report" / "page.html", "single")
    tracker.folder(tmp_path / "report", "whole")
    paths = {
        item.path for folder in ("images", "single", "whole") for item in client.list_artifacts(tracker.run_id, folder)
    }
    assert {"single/page.html", "whole/page.html"} <= paths
    assert any(path.startswith("images/samples") and path.endswith(".png") for path in paths)


def test_a_hundred_and_fifty_parameters_fit_and_long_ones_are_cut(tracker, client):
    tracker.params({f"p{i}": i for i in range(150)} | {"long": "x" * 9000})
    params = client.get_run(tracker.run_id).data.params
    assert len(params) == 151
    assert params["p149"] == "149"
    assert params["long"] == "x" * 6000


def test_a_resumed_run_keeps_its_parameters_and_tags_the_new_values(tracker, client):
    tracker.params({"resume": "never", "grpo.steps": 10})
    tracker.params({"resume": "auto", "grpo.steps": 10, "new": None})
    data = client.get_run(tracker.run_id).data
    assert data.params == {"resume": "never", "grpo.steps": "10", "new": "None"}
    assert {k: v for k, v in data.tags.items() if k.startswith("resumed.")} == {"resumed.resume": "auto"}


def test_the_dataset_is_an_input_of_the_run(tracker, client):
    tracker.dataset("records", "a" * 64, "data/01_raw/shapes")
    [entry] = client.get_run(tracker.run_id).inputs.dataset_inputs
    assert (entry.dataset.name, entry.dataset.digest) == ("records", "a" * 36)
    assert "data/01_raw/shapes" in entry.dataset.source


@pytest.mark.parametrize(("end", "status"), [("killed", "KILLED"), ("failed", "FAILED")])
def test_an_ended_run_keeps_its_status(tracker, client, end, status):
    getattr(tracker, end)()
    assert mlflow.active_run() is None
    mlflow.end_run()
    assert client.get_run(tracker.run_id).info.status == status


def test_a_deleted_or_unknown_run_does_not_exist(tracker, client, store):
    assert run_exists(tracker.run_id, store)
    mlflow.end_run()
    client.delete_run(tracker.run_id)
    assert not run_exists(tracker.run_id, store)
    assert not run_exists("0" * 32, store)


def test_a_failed_evaluation_leaves_the_training_finished(tracker, client):
    mlflow.end_run()
    mlflow.start_run(run_id=tracker.run_id)
    tracker.evaluation_begins("kedro run --pipeline=evaluate")
    assert tracker.evaluates
    tracker.failed()
    run = client.get_run(tracker.run_id)
    assert (run.info.status, run.data.tags["evaluate.status"]) == ("FINISHED", "failed")
    assert not tracker.evaluates
    tracker.failed()
    assert client.get_run(tracker.run_id).info.status == "FAILED"


def test_a_table_a_text_and_a_model(tracker, client, tmp_path: Path):
    tracker.table([{"score": "total", "gain": None}, {"score": "shapes", "gain": 0.5}], "scores.json")
    tracker.text("# Card", "adapters/README.md")
    tracker.text("# Better card", "adapters/README.md")
    (tmp_path / "weights").write_text("w")
    tracker.model(tmp_path, "adapter", {"base": "b"})
    table = mlflow.artifacts.load_dict(f"runs:/{tracker.run_id}/scores.json")
    assert table == {"columns": ["score", "gain"], "data": [["total", None], ["shapes", 0.5]]}
    assert mlflow.artifacts.load_text(f"runs:/{tracker.run_id}/adapters/README.md") == "# Better card"
    run = client.get_run(tracker.run_id)
    [output] = run.outputs.model_outputs
    model = client.get_logged_model(output.model_id)
    assert (model.name, model.params, model.source_run_id) == ("adapter", {"base": "b"}, tracker.run_id)
    assert (Path(model.artifact_location.removeprefix("file://")) / "weights").read_text() == "w"


def test_tags_are_removed_where_they_are(tracker):
    tracker.tags({"a": 1, "b": 2})
    tracker.remove_tags({"a", "c"})
    tags = tracker.all_tags()
    assert "a" not in tags
    assert tags["b"] == "2"
