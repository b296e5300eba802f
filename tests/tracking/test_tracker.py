"""What a run logs is in a real MLflow store when it has ended."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

import mlflow
import pytest
from PIL import Image

from tests.tracking.conftest import Project
from visual_grpo.tracking import Tracker


def test_without_a_run_every_call_does_nothing(tmp_path: Path):
    tracker = Tracker.active()
    assert tracker.run_id is None
    assert tracker.name() is None
    tracker.metrics({"a": 1.0}, step=1)
    tracker.results({"a": 1.0}, step=1)
    tracker.image(Image.new("RGB", (4, 4)), "grid", 1)
    tracker.folder(tmp_path / "missing", "x")
    tracker.tags({"a": 1})
    tracker.params({"a": 1})
    tracker.dataset("records", "abc", "data")
    tracker.killed()
    assert list(tmp_path.iterdir()) == []


def test_metrics_are_there_during_the_run_step_by_step(project: Project, quick):
    tracker = project.start()
    tracker.metrics({"reward/total": 0.5, "kl": 0.1}, step=1)
    tracker.metrics({"reward/total": 0.75, "kl": math.nan}, step=2)
    deadline = time.monotonic() + 30
    while len(project.curve(tracker.run_id, "kl")) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert project.curve(tracker.run_id, "reward/total") == [(1, 0.5), (2, 0.75)]
    [_, (step, value)] = project.curve(tracker.run_id, "kl")
    assert (step, math.isnan(value)) == (2, True)
    assert project.run(tracker.run_id).info.status == "RUNNING"
    assert (Tracker.active(), os.environ["MLFLOW_RUN_ID"]) == (tracker, tracker.run_id)
    tracker.finished()
    assert project.run(tracker.run_id).info.status == "FINISHED"
    assert Tracker.active().run_id is None
    assert "MLFLOW_RUN_ID" not in os.environ
    assert not project.spools.exists()
    assert project.said == []


def test_a_later_measurement_of_the_same_step_is_the_one_that_counts(project: Project):
    tracker = project.start()
    tracker.results({"result/gain": 0.1}, step=80)
    tracker.finished()
    time.sleep(0.002)
    again = project.start(earlier=tracker.run_id)
    again.results({"result/gain": 0.2}, step=80)
    again.finished()
    assert project.run(tracker.run_id).data.metrics["result/gain"] == 0.2


def test_images_folders_texts_and_tables_become_artifacts(project: Project, tmp_path):
    (tmp_path / "report/parts").mkdir(parents=True)
    (tmp_path / "report/page.html").write_text("x")
    (tmp_path / "report/parts/list").write_text("y")
    tracker = project.start()
    for step in (1, 2):
        tracker.image(Image.new("RGB", (400, 200), (step, 0, 0)), "samples/eval", step)
    tracker.folder(tmp_path / "report", "whole")
    tracker.table([{"score": "total", "gain": None}, {"score": "shapes", "gain": 0.5}], "deep/scores.json")
    tracker.text("# Card", "adapters/README.md")
    tracker.text("# Better card", "adapters/README.md")
    tracker.finished()
    files = project.artifacts(tracker.run_id)
    images = sorted(name for name in files if name.startswith("images/"))
    assert [name.split("+timestamp+")[0] for name in images] == [
        f"images/samples~eval+step+{step}" for step in (1, 1, 2, 2)
    ]
    assert [name.endswith("+compressed.webp") for name in images] == [True, False, True, False]
    logged = project.folder / "artifacts" / str(tracker.run_id) / "artifacts" / images[3]
    with Image.open(logged) as image, Image.open(str(logged).replace(".png", "+compressed.webp")) as small:
        assert (image.size, image.getpixel((0, 0)), small.size) == ((400, 200), (2, 0, 0), (256, 128))
    assert project.run(tracker.run_id).data.tags["mlflow.loggedImages"] == "True"
    others = {name: content for name, content in files.items() if name not in images}
    assert json.loads(others.pop("deep/scores.json")) == {
        "columns": ["score", "gain"],
        "data": [["total", None], ["shapes", 0.5]],
    }
    assert others == {"whole/page.html": b"x", "whole/parts/list": b"y", "adapters/README.md": b"# Better card"}


def test_what_is_logged_stays_what_it_was_when_the_output_is_replaced(project: Project, tmp_path):
    database = project.database.rename(tmp_path / "elsewhere")
    project.database.mkdir()  # Cannot be opened.
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters/weights").write_text("first")
    tracker = project.start()
    tracker.folder(tmp_path / "adapters", "adapters")
    (tmp_path / "adapters").rename(tmp_path / "old")
    (tmp_path / "old/weights").unlink()
    project.database.rmdir()
    database.rename(project.database)
    tracker.finished()
    [run] = project.runs()
    assert project.artifacts(run.info.run_id) == {"adapters/weights": b"first"}


def test_a_hundred_and_fifty_parameters_fit_and_long_ones_are_cut(project: Project):
    tracker = project.start()
    tracker.params({f"p{i}": i for i in range(150)} | {"long": "x" * 9000})
    tracker.finished()
    params = project.run(tracker.run_id).data.params
    assert len(params) == 151
    assert params["p149"] == "149"
    assert params["long"] == "x" * 6000


def test_a_resumed_run_keeps_its_parameters_and_tags_the_new_values(project: Project):
    first = project.start()
    first.params({"resume": "never", "grpo.steps": 10})
    first.killed()
    second = project.start(earlier=first.run_id, name="another")
    second.params({"resume": "auto", "grpo.steps": 10, "new": None})
    assert second.continues
    assert second.name() == first.name() == f"ar seed 0 ({str(first.run_id)[:8]})"
    second.finished()
    run = project.run(first.run_id)
    assert run.data.params == {"resume": "never", "grpo.steps": "10", "new": "None"}
    assert {k: v for k, v in run.data.tags.items() if k.startswith("resumed.")} == {"resumed.resume": "auto"}
    assert run.info.status == "FINISHED"


def test_the_dataset_is_an_input_of_the_run(project: Project):
    tracker = project.start()
    tracker.dataset("records", "a" * 64, "data/01_raw/shapes")
    tracker.finished()
    inputs = project.run(tracker.run_id).inputs
    assert inputs is not None
    [entry] = inputs.dataset_inputs
    assert (entry.dataset.name, entry.dataset.digest) == ("records", "a" * 36)
    assert json.loads(entry.dataset.source) == {"uri": "data/01_raw/shapes"}


@pytest.mark.parametrize(("end", "status"), [("killed", "KILLED"), ("failed", "FAILED"), ("finished", "FINISHED")])
def test_an_ended_run_keeps_its_status(project: Project, end, status):
    tracker = project.start()
    getattr(tracker, end)()
    tracker.failed()
    tracker.metrics({"late": 1.0}, 1)
    assert project.run(tracker.run_id).info.status == status


@pytest.mark.parametrize(("end", "how"), [("killed", "stopped"), ("failed", "failed")])
def test_a_training_that_ends_before_its_first_step_says_so_in_its_name(project: Project, end: str, how: str):
    for trains, steps, name in (
        (True, 0, f"ar seed 0 ({how} before step 1)"),
        (True, 1, "ar seed 0"),
        (False, 0, "ar seed 0"),
    ):
        tracker = project.start(trains=trains)
        for step in range(steps):
            tracker.metrics({"reward": 0.1}, step + 1)
        getattr(tracker, end)()
        assert project.run(tracker.run_id).info.run_name == name
        resumed = project.start(earlier=tracker.run_id, trains=trains)
        getattr(resumed, end)()
        assert project.run(tracker.run_id).info.run_name == name


def test_a_deleted_run_gives_way_to_a_new_one_which_is_found_by_its_old_id(project: Project):
    first = project.start()
    first.finished()
    project.client.delete_run(str(first.run_id))
    ids = []
    for continues in (False, True):
        tracker = project.start(earlier=first.run_id)
        assert tracker.continues == continues
        tracker.finished()
        ids.append(tracker.run_id)
    assert ids[0] == ids[1] != first.run_id


def test_a_failed_evaluation_leaves_the_training_finished(project: Project):
    training = project.start()
    training.finished()
    tracker = project.start(earlier=training.run_id)
    tracker.evaluation_begins("kedro run --pipeline=evaluate")
    assert tracker.evaluates
    tracker.failed()
    run = project.run(tracker.run_id)
    assert (run.info.status, run.data.tags["evaluate.status"]) == ("FINISHED", "failed")


def test_a_model_is_listed_with_its_run(project: Project, tmp_path: Path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/weights").write_text("w")
    tracker = project.start()
    tracker.model(tmp_path / "adapter", "adapter", {"base": "b"})
    tracker.finished()
    outputs = project.run(tracker.run_id).outputs
    assert outputs is not None
    [output] = outputs.model_outputs
    model = project.client.get_logged_model(output.model_id)
    assert (model.name, model.params, model.source_run_id) == ("adapter", {"base": "b"}, tracker.run_id)
    assert (Path(model.artifact_location.removeprefix("file://")) / "weights").read_text() == "w"


def test_tags_are_removed_where_they_are(project: Project):
    tracker = project.start()
    tracker.tags({"a": 1, "b": 2, "long": "x" * 9000})
    tracker.remove_tags({"a", "c"})
    tracker.finished()
    tags = project.run(tracker.run_id).data.tags
    assert "a" not in tags
    assert (tags["b"], tags["long"]) == ("2", "x" * 5000)


def test_what_mlflow_refuses_is_left_out_and_the_rest_arrives(project: Project, caplog: pytest.LogCaptureFixture):
    tracker = project.start()
    tracker.metrics({"good": 1.0}, 1)
    tracker.metrics({"bad=name": 1.0}, 2)
    tracker.metrics({"good": 3.0}, 3)
    tracker.finished()
    assert project.curve(tracker.run_id, "good") == [(1, 1.0), (3, 3.0)]
    assert "MLflow refuses what was logged as curves bad=name" in caplog.text
    assert project.run(tracker.run_id).info.status == "FINISHED"


def test_functions_of_mlflow_that_a_reward_calls_find_the_run(project: Project):
    tracker = project.start()
    with mlflow.start_run():
        mlflow.log_metric("own", 1.0)
    tracker.finished()
    assert project.curve(tracker.run_id, "own") == [(0, 1.0)]
    assert len(project.runs()) == 1


def test_processes_that_are_given_the_same_key_log_into_one_run(project: Project):
    """As the tasks of an orchestrator do: the first of them makes the run."""
    key = "843d4d219bf65cf6b26341de467727dc"
    first = project.start(earlier=key)
    assert not first.continues
    first.metrics({"reward/total": 1.0}, step=1)
    first.finished()
    second = project.start(earlier=key)
    assert second.continues
    second.finished()
    assert second.run_id == first.run_id != key
    assert [run.info.run_id for run in project.runs()] == [first.run_id]
