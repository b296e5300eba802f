"""MLflow away, locked, deleted or hanging: the run goes on, one line says so, and everything arrives later."""

from __future__ import annotations

import random
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.tracking.conftest import Project
from visual_grpo.tracking import Tracker
from visual_grpo.tracking.deliver import _redirect, deliver

STEP = 4.0
"""Seconds that no step waits for MLflow, however busy the machine is: one that sent its metrics itself would wait for
the lock's end or for SQLite's 5 s."""


def train(tracker: Tracker, steps: range, pause: float = 0.0) -> float:
    """Logs; returns the longest time that a step had to wait for that, in seconds."""
    longest = 0.0
    for step in steps:
        began = time.perf_counter()
        tracker.metrics({f"m{number}": step / 7 for number in range(60)}, step)
        longest = max(longest, time.perf_counter() - began)
        time.sleep(pause)
    return longest


def wait_until(project: Project, lines: int) -> None:
    deadline = time.monotonic() + 40
    while len(project.said) < lines and time.monotonic() < deadline:
        time.sleep(0.05)


def wait_for_step(project: Project, tracker: Tracker, step: int) -> None:
    deadline = time.monotonic() + 60
    while len(project.curve(tracker.run_id, "m59")) < step and time.monotonic() < deadline:
        time.sleep(0.05)


def test_a_locked_database_stops_nothing(project: Project, quick):
    quick(NOTICED=1.0)
    tracker = project.start()
    train(tracker, range(1, 4))
    wait_for_step(project, tracker, 3)
    with sqlite3.connect(project.database, isolation_level=None, timeout=60) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert train(tracker, range(4, 30), pause=0.02) < STEP
        tracker.image(Image.new("RGB", (8, 8)), "samples", 29)
        wait_until(project, 1)
        other.execute("ROLLBACK")
    other.close()
    wait_until(project, 2)
    tracker.finished()
    one_outage = [
        f"MLflow ({project.uri}) is away: no answer in 1 s. The run goes on; what it logs waits in"
        f" {next(iter(project.said)).rpartition(' ')[2]}",
        "MLflow is back and gets what waited.",
    ]
    # On a busy machine one that is not locked takes longer than a second too: each outage is told once.
    assert project.said == len(project.said) // 2 * one_outage
    assert project.curve(tracker.run_id, "m59") == [(step, step / 7) for step in range(1, 30)]
    assert any(name.endswith(".png") for name in project.artifacts(tracker.run_id))
    assert not project.spools.exists()


def test_a_database_that_is_locked_at_the_start_does_not_hold_the_run_up(project: Project, quick):
    quick(START=1.0)
    with sqlite3.connect(project.database, isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        tracker = project.start()
        train(tracker, range(1, 10))
        tracker.params({"p": 1})
        assert tracker.name() == f"ar seed 0 ({str(tracker.run_id)[:8]})"
        other.execute("ROLLBACK")
    other.close()
    wait_until(project, 2)
    tracker.finished()
    [run] = project.runs()
    assert (run.info.status, run.data.params, run.info.run_name) == ("FINISHED", {"p": "1"}, "ar seed 0")
    assert project.curve(run.info.run_id, "m0") == [(step, step / 7) for step in range(1, 10)]
    # What training.json holds in place of an id leads an evaluation to the run.
    evaluation = project.start(earlier=tracker.run_id)
    assert (evaluation.continues, evaluation.run_id) == (True, run.info.run_id)


def test_a_database_that_is_deleted_during_the_run_is_made_again_by_the_next_one(
    project: Project, quick, empty_database: Path
):
    tracker = project.start()
    train(tracker, range(1, 4))
    wait_for_step(project, tracker, 3)
    time.sleep(1)
    project.database.unlink()
    train(tracker, range(4, 8))
    wait_until(project, 1)
    tracker.finished()
    assert "attempt to write a readonly database. The run goes on" in project.said[0]
    assert project.said[1].startswith("Not yet in MLflow: 240 metric values, 1 note. They wait in ")
    assert f"python -m visual_grpo.tracking.deliver {project.output}" in project.said[1]
    # MLflow keeps the old database open in this process; another place for the same one.
    shutil.copy(empty_database, project.folder / "new.db")
    for head in project.spools.glob("*/run.json"):
        head.write_text(head.read_text().replace("mlflow.db", "new.db"))
    project.uri = f"sqlite:///{project.folder / 'new.db'}"
    lines, whole = deliver([project.output])
    assert whole
    assert "delivered 240 metric values, 1 note" in lines[0]
    [run] = project.runs()
    assert run.info.status == "FINISHED"
    assert project.curve(run.info.run_id, "m7") == [(step, step / 7) for step in range(1, 8)]
    assert project.start(earlier=tracker.run_id).run_id == run.info.run_id


def test_a_read_only_database_keeps_what_waits(project: Project, quick, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(project.folder)  # SQLAlchemy's form of the address is a relative path to MLflow, which it makes.
    project.uri = f"sqlite:///file:{project.database}?mode=ro&uri=true"
    tracker = project.start()
    train(tracker, range(1, 3))
    tracker.failed()
    assert "readonly database" in project.said[0]
    [head] = project.spools.glob("*/run.json")
    head.write_text(head.read_text().replace("file:", "").replace("?mode=ro&uri=true", ""))
    project.uri = f"sqlite:///{project.database}"
    assert deliver([project.output])[1]
    [run] = project.runs()
    assert run.info.status == "FAILED"
    assert project.curve(run.info.run_id, "m0") == [(1, 1 / 7), (2, 2 / 7)]


@pytest.fixture
def silent_server() -> Iterator[str]:
    """Takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://user:a-password@127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("kind", ["dead", "silent"])
def test_a_server_that_does_not_answer_costs_seconds_and_no_secret(
    project: Project, quick, kind: str, silent_server: str
):
    server = silent_server if kind == "silent" else "http://user:a-password@127.0.0.1:9"
    project.uri, state = server, random.getstate()
    if kind == "silent":  # A dead one refuses at once, however busy the machine is.
        quick(NOTICED=1.0, START=1.0)
    began = time.monotonic()
    tracker = project.start()
    assert train(tracker, range(1, 10)) < STEP
    tracker.finished()
    assert time.monotonic() - began < 30  # MLflow's own attempts take more than 4 minutes.
    reason = "no answer in 1 s" if kind == "silent" else "Connection refused"
    assert reason in project.said[0]
    assert "540 metric values" in project.said[1]
    assert random.getstate() == state
    everything = "".join(project.said).encode() + b"".join(
        path.read_bytes() for path in project.output.rglob("*") if path.is_file()
    )
    assert b"password" not in everything


def test_the_command_says_what_it_could_not_deliver(project: Project, quick):
    project.uri = "http://127.0.0.1:9"
    tracker = project.start()
    tracker.failed()
    lines, whole = deliver([project.output])
    assert not whole
    assert ": waits, MLflow (http://127.0.0.1:9) does not answer: " in lines[0]
    assert deliver([project.folder / "empty"]) == ([f"Nothing waits for MLflow in {project.folder / 'empty'}."], True)


def test_what_belongs_to_a_wrong_address_is_sent_to_the_right_one(project: Project, quick):
    right = project.uri
    project.uri = "http://127.0.0.1:9"
    tracker = project.start()
    train(tracker, range(1, 3))
    tracker.failed()
    command = [sys.executable, "-m", "visual_grpo.tracking.deliver", str(project.output), "--to", right]
    done = subprocess.run(command, cwd=project.folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ": delivered " in done.stdout
    project.uri = right
    [run] = project.runs()
    assert project.curve(run.info.run_id, "m0") == [(1, 1 / 7), (2, 2 / 7)]
    assert not list(project.spools.glob("*"))


def test_what_another_server_has_in_part_stays_its_own(project: Project, quick):
    tracker = project.start()
    train(tracker, range(1, 3))
    tracker.failed()
    project.uri = "http://127.0.0.1:9"
    tracker = project.start()
    train(tracker, range(3, 4))
    tracker.failed()
    [folder] = project.spools.glob("*-*")
    (folder / "delivered").write_text("1")
    other = f"sqlite:///{project.folder / 'other.db'}"
    assert _redirect([project.output], other) == [f"{folder}: waits, its beginning is in http://127.0.0.1:9 already"]
    assert deliver([project.output], other)[0] == [f"Nothing waits for MLflow in {project.output}."]
    assert (folder / "journal.jsonl").is_file()


def test_a_folder_that_is_not_there_is_told(tmp_path):
    command = [sys.executable, "-m", "visual_grpo.tracking.deliver", str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"Error: there is no folder {tmp_path / 'nowhere'}\n")


def test_a_spool_of_another_working_folder_is_delivered(project: Project, quick, monkeypatch: pytest.MonkeyPatch):
    """Its head names the database by a path that is another one from here."""
    database = project.database.rename(project.folder / "aside")
    project.database.mkdir()
    tracker = project.start()
    train(tracker, range(1, 3))
    tracker.finished()
    project.database.rmdir()
    database.rename(project.database)
    monkeypatch.chdir(project.folder)
    lines, whole = deliver([project.output])
    assert (whole, "delivered 120 metric values" in lines[0]) == (True, True)
    assert project.curve(project.runs()[0].info.run_id, "m0") == [(1, 1 / 7), (2, 2 / 7)]
    assert not project.spools.exists()


def test_the_command_leaves_a_run_that_is_going_on_to_its_process(project: Project, quick):
    first = project.start()
    lines, whole = deliver([project.output])
    assert not whole
    assert "waits, another process is at it" in lines[0]
    assert project.run(first.run_id).info.status == "RUNNING"


def test_what_an_earlier_run_cannot_deliver_does_not_hold_up_another_run(project: Project, quick, tmp_path: Path):
    (tmp_path / "report").mkdir()
    (tmp_path / "report/page").write_text("x")
    database = project.database.rename(tmp_path / "aside")
    project.database.mkdir()
    earlier = project.start(name="earlier")
    earlier.folder(tmp_path / "report", "evaluation")
    earlier.finished()
    project.database.rmdir()
    database.rename(project.database)
    # Its artifacts cannot be written: a file is in the way.
    first = project.client.create_experiment("test", artifact_location=(project.folder / "artifacts").as_uri())
    (project.folder / "artifacts").write_text("in the way")
    other = project.start(name="other")
    train(other, range(1, 5))
    other.finished()
    assert project.curve(other.run_id, "m0") == [(step, step / 7) for step in range(1, 5)]
    [waits] = project.spools.iterdir()
    lines, whole = deliver([project.output])
    assert (whole, lines[0].startswith(f"{waits}: waits, ")) == (False, True)
    (project.folder / "artifacts").unlink()
    assert deliver([project.output])[1]
    [run] = [run for run in project.runs() if run.info.run_name == "earlier"]
    assert (run.info.experiment_id, run.info.status) == (first, "FINISHED")
    assert project.artifacts(run.info.run_id) == {"evaluation/page": b"x"}


def test_a_resumed_run_gets_its_number_of_steps_though_mlflow_was_away_then(project: Project, quick, tmp_path: Path):
    first = project.start(name="mine, 4 steps")
    first.finished()
    database = project.database.rename(tmp_path / "aside")
    project.database.mkdir()
    resumed = project.start(name="as the parameters say 6 steps", earlier=first.run_id)
    resumed.goes_on_to(6)
    project.database.rmdir()
    database.rename(project.database)
    resumed.finished()
    assert project.run(first.run_id).info.run_name == "mine, 6 steps"
