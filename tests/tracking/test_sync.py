"""`make sync` brings every result on disk into MLflow once, however often it is called."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import sys
import time
from typing import Any

import mlflow
import pytest
from PIL import Image

from tests.evaluation.test_verdict import entry as an_entry
from tests.tracking.conftest import Project, crash
from tests.tracking.toy_adapters import adapters, base_model
from visual_grpo.adapter_folder import FACTS, adapter_digest, read_facts
from visual_grpo.evaluation.verdict import change, summarise
from visual_grpo.operations.training_command import show_replaced
from visual_grpo.tracking import sync

STEPS = 5


class Results:
    """A folder of outputs as train and evaluate leave it."""

    def __init__(self, project: Project, run_id: str, steps: int = STEPS) -> None:
        self.project, self.output = project, project.output
        shutil.rmtree(self.output, ignore_errors=True)
        base = project.folder / "base"
        folder = adapters(
            self.output / "06_models/adapters",
            base if base.is_dir() else base_model(base),
            mlflow_run_id=run_id,
            steps=steps,
            alarms=[{"step": 2, "sentence": "all alike"}],
            records={"train": 9, "held_out": 3},
            **{"run.name": "ar 5 steps", "version.torch": "2"},
        )
        rows = [f"{step},{step / 10},{'' if step % 2 else step},0.5" for step in range(1, steps + 1)]
        (folder / "training.csv").write_text("\n".join(["step,reward/total,eval/total,seconds/step", *rows]))
        for name in ("samples-000001", "samples-000005", "alarm-000002"):
            Image.new("RGB", (8, 8)).save(folder / f"{name}.png")
        self.adapters = folder

    def evaluate(self, *entries: dict[str, Any]) -> None:
        rows = list(entries) or [an_entry()]
        report = self.output / "08_reporting/evaluation"
        report.mkdir(parents=True, exist_ok=True)
        (report / "evaluation.html").write_text("page")
        Image.new("RGB", (1600, 500)).save(report / "samples.png")
        tree = {"headline": summarise(rows), "training": read_facts(self.adapters), "rewards": rows}
        tree |= {"modules": ["ar", "dit"], "adapter_digest": adapter_digest(self.adapters)}
        report.with_suffix(".json").write_text(json.dumps(tree))

    def sync(self) -> list[str]:
        said, whole = sync.sync([self.output])
        assert whole, said
        return said

    def numbers(self, run_id: str, metric: str) -> list[tuple[int, float]]:
        return [point for point in self.project.curve(run_id, metric) if not math.isnan(point[1])]

    def in_mlflow(self) -> dict[str, Any]:
        """What its one run has, without what MLflow makes up."""
        [run] = self.project.runs()
        files = {name: text for name, text in self.project.artifacts(run.info.run_id).items() if "images" not in name}
        return {
            "curves": {name: self.numbers(run.info.run_id, name) for name in run.data.metrics},
            "pictures": self.project.pictures(run.info.run_id),
            "files": files,
            "params": run.data.params,
            "inputs": {
                one.tags[0].value: (one.dataset.name, one.dataset.digest, json.loads(str(one.dataset.profile)))
                for one in (run.inputs.dataset_inputs if run.inputs else ())
            },
            "tags": {name: value for name, value in run.data.tags.items() if name not in ("mlflow.user", "output")},
            "status": run.info.status,
        }


def complete(found: dict[str, Any], steps: int = STEPS) -> None:
    assert next(iter(found["curves"])) == "result/gain", "MLflow's page of compared runs begins with it"
    assert found["curves"]["reward/total"] == [(step, step / 10) for step in range(1, steps + 1)]
    assert found["curves"]["eval/total"] == [(step, float(step)) for step in range(2, steps + 1, 2)]
    assert found["pictures"] == ["alarm+step+2", "samples+step+1", "samples+step+5"]
    assert {f"adapters/{FACTS}", "adapters/best/ar/adapter_model.safetensors"} <= found["files"].keys()
    assert (found["tags"]["dataset.digest"], found["tags"]["alarm"]) == ("d" * 64, "step 2: all alike")
    assert found["inputs"]["data"] == ("shapes", "d" * 12, {"task": "t2i", "records": {"train": 9, "held_out": 3}})
    assert found["inputs"]["base model"][0] == "base"


def judged(found: dict[str, Any]) -> None:
    headline = summarise([an_entry()])
    assert found["curves"]["result/gain"] == [(STEPS, float(f"{headline['difference']:.4g}"))]
    assert found["files"]["evaluation/evaluation.html"] == b"page"
    assert json.loads(found["files"]["evaluation/scores.json"])["columns"] == list(an_entry())
    assert headline["sentence"] in found["files"]["adapters/README.md"].decode()
    assert (found["tags"]["verdict"], found["tags"]["result"]) == (headline["verdict"], headline["sentence"])
    assert found["tags"]["gain"] == change(headline)
    description = found["tags"]["mlflow.note.content"]
    assert headline["sentence"] in description
    assert "path=evaluation/evaluation.html" in description
    assert "path=evaluation/samples_small.png" in description
    with Image.open(io.BytesIO(found["files"]["evaluation/samples_small.png"])) as picture:
        assert picture.size == (640, 200), "MLflow's page would be as wide as a larger one"


def test_a_run_that_mlflow_never_had_is_made_whole_and_once(project: Project) -> None:
    results = Results(project, "0" * 32)
    results.evaluate()
    assert len(results.sync()) == 2
    first = results.in_mlflow()
    complete(first)
    judged(first)
    assert first["status"] == "FINISHED"
    assert (first["tags"]["mlflow.runName"], first["tags"]["command"]) == ("ar 5 steps", ".venv/bin/kedro run")
    assert (first["tags"]["version.torch"], first["params"]["grpo.loss"]) == ("2", "grpo")
    for _ in range(2):
        assert "lacks nothing" in results.sync()[0]
        assert results.in_mlflow() == first


def test_a_training_says_what_it_replaces_and_whether_mlflow_keeps_it(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    results = Results(project, "0" * 32)
    results.sync()
    [run] = project.runs()
    own, other = run.info.run_id, "1" * 32
    kept, lost = f"MLflow keeps it: adapter={own}", "MLflow does not keep it: copy the folder"

    def check(steps: int, run_id: str, said: str, length: int = STEPS) -> None:
        show_replaced(results.adapters, steps, run_id)
        printed = capsys.readouterr().out
        assert f"This training replaces the adapter of {length} steps in {results.adapters}" in printed
        assert said in printed
        assert "(ar 5 steps)" in printed

    check(4, other, kept)
    check(5, other, kept)
    check(4, own, lost)  # Its own part will be logged over them.
    show_replaced(results.adapters, 5, own)
    assert capsys.readouterr().out == "", "it goes on"
    project.client.delete_run(own)
    check(4, other, lost)
    project.client.restore_run(own)
    Results(project, "0" * 32, steps=6)
    check(4, other, lost, 6)


def test_what_a_training_could_not_log_is_added_beside_what_it_could(project: Project) -> None:
    tracker = project.start()
    for step in (1, 3):
        tracker.metrics({"reward/total": step / 10, "learning_rate": 1.0}, step)
    while len(project.run(tracker.run_id).data.metrics) < 2:
        time.sleep(0.1)
    results = Results(project, str(tracker.run_id))
    tracker.image(Image.new("RGB", (8, 8)), "samples", 1)
    tracker.params({"grpo.loss": "mine"})
    tracker.end("FINISHED")
    found = results.in_mlflow()
    complete(found)
    assert found["curves"]["learning_rate"] == [(1, 1.0), (3, 1.0)]
    assert found["params"]["grpo.loss"] == "mine", "what was logged stays"
    assert found["params"].keys() == sync.training_params(read_facts(results.adapters)["parameters"]).keys()
    results.evaluate()
    evaluation = project.start(earlier=tracker.run_id)
    evaluation.evaluation_begins("kedro run --pipeline=evaluate")
    evaluation.end("FINISHED")
    judged(results.in_mlflow())


OF_TRAINING = ("create_run", "log_batch", "log_image", "log_artifacts")
OF_EVALUATION = ("log_artifacts", "log_image", "log_text", "log_batch", "set_terminated")
CUTS = [(method, after) for method in OF_TRAINING for after in (False, True)]
CUTS += [("set_terminated", False), *((method, True) for method in OF_EVALUATION)]


def test_a_sync_that_is_cut_short_everywhere_is_completed(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results(project, "0" * 32)
    results.evaluate()
    for method, after in CUTS:
        with pytest.raises(SystemExit), crash(monkeypatch, method, after):
            sync.sync([results.output])
    results.sync()
    found = results.in_mlflow()
    complete(found)
    judged(found)
    assert found["status"] == "FINISHED"
    assert [len(set(points)) for points in found["curves"].values()] == [len(p) for p in found["curves"].values()]


def test_a_training_that_went_on_replaces_its_adapters_and_takes_its_verdict_back(project: Project) -> None:
    results = Results(project, "0" * 32)
    (results.adapters / "changes.diff").write_text("of its first part")
    results.evaluate()
    results.sync()
    kept = (results.output / "08_reporting").rename(project.folder / "reporting")
    results = Results(project, "0" * 32, steps=7)
    kept.rename(results.output / "08_reporting")
    assert len(results.sync()) == 1, "the evaluation on disk is of the adapters before"
    found = results.in_mlflow()
    complete(found, 7)
    assert "adapters/changes.diff" not in found["files"], "the folder has none now"
    assert {found["tags"][name] for name in ("result", "evaluate.status", sync.EVALUATION_DIGEST)} == {""}
    assert found["tags"]["verdict"] == "not evaluated"


def test_mlflow_shows_the_results_of_the_present_verdict_alone(project: Project) -> None:
    """It sorts by them, and takes the value of the highest step for the present one."""
    loss: dict[str, Any] = {"difference": -0.2, "ci_low": -0.3, "ci_high": -0.1, "trained": 0.8}
    judge = an_entry("lay", optimised=False, judge_of="total", confidence=0.95, **loss)
    shown = []
    for steps, entries in (
        (7, [an_entry(), judge]),
        (7, [an_entry()]),
        (9, None),  # The training went on, and nothing was judged.
        (5, [an_entry(**loss)]),
        (5, [an_entry(difference=None, ci_low=None, ci_high=None, trained=None)]),
    ):
        results = Results(project, "0" * 32, steps)
        if entries:
            results.evaluate(*entries)
        for _ in range(2):
            results.sync()
        [run] = project.runs()
        numbers = [run.data.metrics[f"result/{name}"] for name in ("gain", "trained", "by_judge", "judge/lay")]
        shown.append([None if math.isnan(number) else number for number in numbers])
        assert bool(run.data.tags["gain"]) == (not math.isnan(numbers[0]))
    assert shown == [
        [0.4, 1.4, -0.2, -0.2],
        [0.4, 1.4, None, None],
        [None] * 4,
        [-0.2, 0.8, None, None],
        [None] * 4,
    ]
    assert results.numbers(run.info.run_id, "result/gain") == [(7, 0.4), (9, -0.2)]


def test_a_record_that_names_a_run_with_other_adapters_does_not_change_its_verdict(project: Project) -> None:
    results = Results(project, "0" * 32)
    results.evaluate()
    results.sync()
    [run] = project.runs()
    project.client.set_tag(run.info.run_id, sync.DIGEST, adapter_digest(results.adapters))
    before = results.in_mlflow()
    own = results.adapters.rename(project.folder / "own")
    theirs = Results(project, "0" * 32)
    (theirs.adapters / "changes.diff").write_text("their changes")
    theirs.evaluate()
    shutil.rmtree(theirs.adapters)
    own.rename(theirs.adapters)
    assert "lacks nothing" in theirs.sync()[0]
    assert theirs.in_mlflow() == before


def test_a_picture_that_is_no_png_is_given_to_no_other_program(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow gives PostScript to Ghostscript."""
    results = Results(project, "0" * 32)
    ghostscript, ran = project.folder / "gs", project.folder / "ran"
    ghostscript.write_text(f"#!/bin/sh\ntouch {ran}\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", f"{project.folder}:{os.environ['PATH']}")
    Image.new("RGB", (8, 8)).save(results.adapters / "samples-000001.png", format="EPS")
    said, whole = sync.sync([results.output])
    assert not whole, said
    assert not ran.exists()


def test_a_result_with_a_link_is_not_logged(project: Project) -> None:
    results = Results(project, "0" * 32)
    results.evaluate()
    secret = project.folder / "id_ed25519"
    secret.write_text("private key")
    for place in ("06_models/adapters/ar/more.txt", "08_reporting/evaluation/more.html"):
        (results.output / place).symlink_to(secret)
        (said, *_), whole = sync.sync([results.output])
        assert (f"{place} is a link" in said, whole) == (True, False)
        assert b"private key" not in results.in_mlflow()["files"].values()
        (results.output / place).unlink()
    results.sync()
    complete(results.in_mlflow())


def test_a_run_that_the_user_deleted_stays_deleted(project: Project) -> None:
    results = Results(project, "0" * 32)
    results.sync()
    [run] = project.runs()
    project.client.delete_run(run.info.run_id)
    results.evaluate()
    results.sync()
    assert project.runs() == []


def test_a_command_adds_the_results_of_earlier_ones_before_it_replaces_them(project: Project) -> None:
    Results(project, "0" * 32)
    project.start().end("FINISHED")
    assert len(project.runs()) == 2


def test_results_without_a_run_and_damaged_ones_are_left_alone(project: Project) -> None:
    results = Results(project, "")
    assert "lacks nothing" in results.sync()[0]
    (results.adapters / FACTS).write_text("{")
    assert "lacks nothing" in results.sync()[0]


def test_the_command_looks_in_data_and_the_folders_in_it_and_says_whether_something_is_left(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project.output = project.folder / "data/shapes"
    Results(project, "0" * 32)
    monkeypatch.chdir(project.folder)
    for uri, code, said in (
        ("http://user:secret@127.0.0.1:9", 1, "data/shapes: MLflow (http://127.0.0.1:9) does not answer: "),
        (project.uri, 0, "data/shapes: added to MLflow: training of ar 5 steps ("),
    ):
        mlflow.set_tracking_uri(uri)
        monkeypatch.setattr(sys, "argv", ["sync"])
        with pytest.raises(SystemExit) as end:
            sync.main()
        assert end.value.code == code
        assert capsys.readouterr().out.startswith(said)
