"""What a run logs is in a real MLflow store when it has ended."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest
from PIL import Image

from tests.tracking.conftest import Project
from visual_grpo.tracking.tracker import Tracker


def test_metrics_are_there_during_the_run_step_by_step(project: Project):
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
    assert Tracker.active() is tracker
    tracker.end("FINISHED")
    assert project.run(tracker.run_id).info.status == "FINISHED"
    nothing = Tracker.active()
    nothing.metrics({"a": 1.0}, step=1)
    nothing.end("KILLED")
    assert (nothing.run_id, nothing.name()) == (None, None)
    assert project.said == []
    view = project.client.get_experiment(project.experiment).tags["mlflow.sharedViewState.gain"]
    view = json.loads(view)
    assert view["orderByKey"] == "metrics.`result/gain`", "`make ui` opens this view"
    assert view["columnOrder"][:2] == ["tags.`gain`", "tags.`verdict`"]
    assert view["compareRunCharts"][0]["metricKey"] == "result/gain", "the gain comes first"


def test_a_resumed_run_keeps_its_parameters_and_tags_the_new_values(project: Project):
    first = project.start()
    first.params({"resume": "never", "grpo.steps": 10})
    first.end("KILLED")
    second = project.start(earlier=first.run_id, name="another")
    second.params({"resume": "auto", "grpo.steps": 10, "new": None})
    assert second.continues
    assert second.name() == first.name() == f"ar seed 0 ({str(first.run_id)[:8]})"
    second.end("FINISHED")
    run = project.run(first.run_id)
    assert run.data.params == {"resume": "never", "grpo.steps": "10", "new": "None"}
    assert {k: v for k, v in run.data.tags.items() if k.startswith("resumed.")} == {"resumed.resume": "auto"}
    assert run.info.status == "FINISHED"


@pytest.mark.parametrize(("chosen", "named"), [(None, "ar 20 steps"), ("my favourite", "my favourite")])
def test_a_resumed_run_is_named_by_its_new_steps_unless_the_user_named_it(
    project: Project, chosen: str | None, named: str
) -> None:
    first = project.start(name="ar 10 steps")
    first.end("FINISHED")
    project.client.update_run(str(first.run_id), name=chosen)
    for _ in range(2):
        again = project.start(earlier=first.run_id)
        again.rename(lambda old: old.replace("10", "20"))
        again.end("FINISHED")
        assert project.run(first.run_id).info.run_name == named


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_key_and_the_id_of_a_deleted_run_name_a_new_run_which_later_commands_find(project: Project, is_deleted: bool):
    """Tasks of an orchestrator share a key: the first of them makes the run."""
    key = "843d4d219bf65cf6b26341de467727dc"
    if is_deleted:
        first = project.start()
        first.end("FINISHED")
        key = str(first.run_id)
        project.client.delete_run(key)
    for continues in (False, True):
        tracker = project.start(earlier=key)
        assert tracker.continues == continues
        tracker.end("FINISHED")
        assert [run.info.run_id for run in project.runs()] == [tracker.run_id] != [key]


@pytest.mark.parametrize("status", ["KILLED", "FAILED", "FINISHED"])
def test_an_ended_run_keeps_its_status_and_a_trainings_is_kept_while_it_is_evaluated(project: Project, status: Any):
    tracker = project.start()
    tracker.end(status)
    tracker.end("FAILED")
    tracker.metrics({"late": 1.0}, 1)
    assert project.run(tracker.run_id).info.status == status
    again = project.start(earlier=tracker.run_id)
    again.evaluation_begins("kedro run --pipeline=evaluate")
    assert again.evaluates
    again.end(status)
    run = project.run(tracker.run_id)
    assert (run.info.status, run.data.tags["evaluate.status"]) == ("FINISHED", status.lower())


def test_steps_and_images_that_a_resumed_training_does_again_are_there_once(project: Project):
    first = project.start()
    for step in range(1, 6):
        first.metrics({"reward": step / 10, "seconds": step * 1.0}, step)
    first.image(Image.new("RGB", (400, 200), "red"), "samples", 4)
    first.end("KILLED")
    second = project.start(earlier=first.run_id)
    for step in range(4, 8):
        second.metrics({"reward": step / 10, "seconds": step * 2.0, "new": 1.0}, step)
        second.image(Image.new("RGB", (400, 200), "red"), "samples", step)
    second.end("FINISHED")
    assert project.curve(first.run_id, "reward") == [(step, step / 10) for step in range(1, 8)]
    assert [step for step, _ in project.curve(first.run_id, "seconds")] == list(range(1, 8))
    assert [step for step, _ in project.curve(first.run_id, "new")] == [4, 5, 6, 7]
    assert project.pictures(first.run_id) == [f"samples+step+{step}" for step in (4, 5, 6, 7)]


def test_the_run_of_a_killed_process_is_closed_when_the_next_one_begins(project: Project):
    ids = [str(project.start().run_id) for _ in range(3)]
    Tracker.active().end("FINISHED")
    for run_id in ids:
        project.client.update_run(run_id, status="RUNNING")
    project.client.set_tag(ids[1], "evaluate.status", "running")
    project.client.set_tag(ids[2], "output", "another:/folder")
    project.start().end("FINISHED")
    found = [project.run(run_id) for run_id in ids]
    assert [run.info.status for run in found] == ["KILLED", "FINISHED", "RUNNING"]
    assert found[1].data.tags["evaluate.status"] == "killed"
