"""Everything that was logged is in MLflow once: after kills, resumes and deliveries that are begun again."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.tracking.conftest import EXPERIMENT, Project
from visual_grpo.tracking import Tracker
from visual_grpo.tracking.delivery import Delivery
from visual_grpo.tracking.leftovers import deliver_leftovers
from visual_grpo.tracking.outbox import Outbox, outboxes
from visual_grpo.tracking.store import Store

ROOT = Path(__file__).parents[2]


def log_everything(tracker: Tracker, folder: Path) -> None:
    """Every kind of event; metrics of different names, so that several requests are needed."""
    folder.mkdir()
    (folder / "weights").write_text("w")
    tracker.tags({"a": 1, "b": 2})
    tracker.remove_tags({"b"})
    tracker.params({"p": 1})
    tracker.dataset("records", "digest", "place")
    for step in (1, 2, 3):
        tracker.metrics({"reward": step / 10, "kl": float("nan")}, step)
        tracker.image(Image.new("RGB", (8, 8)), "samples", step)
    tracker.folder(folder, "adapters")
    tracker.model(folder, "adapter", {})
    tracker.results({"result/gain": 0.5}, 3)
    tracker.finished()


def everything_in(project: Project) -> dict[str, Any]:
    """All runs, without what MLflow itself makes up: ids and the time of an image."""
    found = {}
    for run in project.runs():
        metrics = {name: [step for step, _ in project.curve(run.info.run_id, name)] for name in run.data.metrics}
        models = project.client.search_logged_models([project.experiment])
        whole = project.run(run.info.run_id)
        assert whole.outputs is not None
        assert whole.inputs is not None
        images = [name for name in project.artifacts(run.info.run_id) if name.startswith("images")]
        found[run.info.run_name] = {
            "metrics": metrics,
            "tags": {name: value for name, value in run.data.tags.items() if name in ("a", "b")},
            "params": run.data.params,
            "status": run.info.status,
            "images": sorted(name.split("+timestamp")[0] + name[-4:] for name in images),
            "artifacts": sorted(set(project.artifacts(run.info.run_id)) - set(images)),
            "models": [(model.name, str(model.status)) for model in models],
            "linked": len(whole.outputs.model_outputs),
            "datasets": len(whole.inputs.dataset_inputs),
        }
    return found


def test_a_delivery_that_is_begun_again_at_any_event_changes_nothing(project: Project, tmp_path: Path):
    database = project.database.rename(tmp_path / "aside")
    project.database.mkdir()  # Cannot be opened: all of it stays in the spool.
    log_everything(project.start(), tmp_path / "adapters")
    project.database.rmdir()
    database.rename(project.database)
    [waiting] = outboxes(project.spools)
    offsets = [0, *(offset for offset, _ in waiting.waiting())]
    kept = shutil.copytree(waiting.folder, tmp_path / "kept")
    deliver_leftovers(project.spools, Store(project.uri))
    assert not project.spools.exists()
    once = everything_in(project)
    assert once["ar seed 0"]["metrics"] == {"reward": [1, 2, 3], "kl": [1, 2, 3], "result/gain": [3]}
    assert (once["ar seed 0"]["linked"], len(once["ar seed 0"]["models"])) == (1, 1)
    assert once["ar seed 0"]["status"] == "FINISHED"
    for offset in offsets:
        again = shutil.copytree(kept, project.spools / waiting.folder.name)
        delivery = Delivery(Outbox(again), Store(project.uri))
        assert delivery.open()
        delivery.outbox.delivered(offset)
        delivery.deliver()
        shutil.rmtree(again)
    assert everything_in(project) == once


def test_what_is_left_over_is_said_in_a_line(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    database = project.database.rename(tmp_path / "aside")
    project.database.mkdir()
    log_everything(project.start(), tmp_path / "adapters")
    project.database.rmdir()
    database.rename(project.database)

    def fail(delivery: Delivery, *, stays_open: bool) -> None:
        raise OSError("the server refuses a-token,\nsee its log")

    monkeypatch.setattr(Delivery, "deliver", fail)
    [left] = deliver_leftovers(project.spools, Store(project.uri))
    assert left.why == "the server refuses a-token, see its log"


def test_rows_that_are_sent_twice_because_the_answer_was_lost_are_there_once(project: Project, quick):
    """The same delivery, without looking at what is there: nothing tells it that its request had arrived."""
    tracker = project.start()
    for step in (1, 2):
        tracker.metrics({"reward": step / 10}, step)
    assert tracker._writer is not None
    delivery = tracker._writer._delivery
    deadline = time.monotonic() + 30
    while not project.curve(tracker.run_id, "reward") or list(delivery.outbox.waiting()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    delivery.outbox.delivered(0)  # The writer has nothing to note meanwhile: nothing waits.
    tracker.metrics({"reward": 0.3}, 3)
    tracker.metrics({"reward": 0.4}, 4)
    tracker.finished()
    assert project.curve(tracker.run_id, "reward") == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]


def test_steps_and_images_that_a_resumed_training_does_again_are_there_once(project: Project):
    first = project.start()
    for step in range(1, 6):
        first.metrics({"reward": step / 10, "seconds": step * 1.0}, step)
    first.image(Image.new("RGB", (8, 8), "red"), "samples", 4)
    first.killed()
    second = project.start(earlier=first.run_id)
    for step in range(4, 8):
        second.metrics({"reward": step / 10, "seconds": step * 2.0, "new": 1.0}, step)
        second.image(Image.new("RGB", (8, 8), "red"), "samples", step)
    second.finished()
    assert project.curve(first.run_id, "reward") == [(step, step / 10) for step in range(1, 8)]
    assert [step for step, _ in project.curve(first.run_id, "seconds")] == list(range(1, 8))
    assert [step for step, _ in project.curve(first.run_id, "new")] == [4, 5, 6, 7]
    pictures = [name for name in project.artifacts(first.run_id) if name.endswith(".png")]
    assert sorted(name.split("+")[2] for name in pictures) == ["4", "5", "6", "7"]


TRAINING = """
import sys, time
from pathlib import Path
from visual_grpo import third_party_output
third_party_output.silence_libraries()
from visual_grpo.tracking import RunToLog, Tracker, writer
writer.EVERY, writer.START = 0.05, 60.0
folder, earlier, begin, end = Path(sys.argv[1]), sys.argv[2] or None, int(sys.argv[3]), int(sys.argv[4])
run = RunToLog(
    name="ar", earlier=earlier, experiment=sys.argv[5], artifacts=(folder / "artifacts").as_uri(),
    tracking_uri=f"sqlite:///{folder / 'mlflow.db'}", output=folder / "data",
)
tracker = Tracker.start(run, print)
print("run", tracker.run_id, flush=True)
for step in range(begin, end):
    tracker.metrics({"reward": step / 7, "kl": step / 9}, step)
    print(step, flush=True)
    time.sleep(0.02)
tracker.finished()
"""


@pytest.mark.slow
def test_nothing_is_missing_or_doubled_after_ten_kills_at_random_moments(project: Project):
    """Each time it goes on from the last step that is a multiple of 10, as from a checkpoint."""
    draw, run_id, begin = random.Random(0), "", 1
    for _ in range(10):
        with subprocess.Popen(
            [sys.executable, "-c", TRAINING, str(project.folder), run_id, str(begin), "100000", EXPERIMENT],
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            word, name = process.stdout.readline().split()
            assert word == "run"
            assert run_id in ("", name)
            run_id = name
            time.sleep(draw.uniform(0, 2))
            process.kill()
            steps = [int(line) for line in process.stdout.read().split()]
        begin = max(begin, (max(steps, default=begin) // 10) * 10 + 1)
    assert project.run(run_id).info.status == "RUNNING"
    last = project.start(earlier=run_id)
    last.metrics({"reward": begin / 7, "kl": begin / 9}, begin)
    last.finished()
    assert begin > 100
    for name, divisor in (("reward", 7), ("kl", 9)):
        found = project.curve(run_id, name)
        assert found[:begin] == [(step, step / divisor) for step in range(1, begin + 1)]
        assert len({step for step, _ in found}) == len(found)
    assert project.run(run_id).info.status == "FINISHED"
    assert not project.spools.exists()


def test_the_run_of_a_killed_process_is_closed_when_the_next_one_begins(project: Project):
    project.client.search_experiments()  # Makes the database, for which a busy machine may need too long.
    code = TRAINING.replace("tracker.finished()", "import os; os.kill(os.getpid(), 9)")
    code = code.replace("0.05, 60.0", "60.0, 60.0")  # Something waits for MLflow when it is killed.
    killed = subprocess.run(
        [sys.executable, "-c", code, str(project.folder), "", "1", "5", EXPERIMENT],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    run_id = killed.stdout.split()[1]
    assert project.run(run_id).info.status == "RUNNING"
    written = max(event["at"] for _, event in Outbox(next(project.spools.iterdir())).waiting())
    other = project.start(name="another")
    other.finished()
    run = project.run(run_id)
    assert (run.info.status, run.info.end_time) == ("KILLED", written)
    assert project.curve(run_id, "reward") == [(step, step / 7) for step in range(1, 5)]
    assert project.run(other.run_id).info.status == "FINISHED"


def test_the_run_of_a_killed_evaluation_keeps_its_training_finished(project: Project, tmp_path: Path):
    training = project.start()
    training.finished()
    evaluation = project.start(earlier=training.run_id)
    evaluation.evaluation_begins("kedro run")
    store = Store(project.uri)
    evaluation.tags({"x": 1})
    deadline = time.monotonic() + 30
    while "x" not in project.run(training.run_id).data.tags and time.monotonic() < deadline:
        time.sleep(0.1)
    store.close_killed(str(training.run_id), 5)
    run = project.run(training.run_id)
    assert (run.info.status, run.data.tags["evaluate.status"]) == ("FINISHED", "killed")
