"""The line for cron and the DAG for Airflow: what they call, and how a failure is told."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.schedules.standin import PATH, SCHEDULES, StandIn
from visual_grpo.config.outputs import FLOW
from visual_grpo.pipeline_registry import PIPELINES
from visual_grpo.retraining.outcome import Code


@pytest.mark.parametrize("code", sorted(Code))
def test_cron_logs_everything_and_mails_the_end_of_it_after_a_failure(tmp_path: Path, code: int) -> None:
    project = StandIn.make(tmp_path / "a project", code)
    (project.folder / "data").mkdir()
    text = (SCHEDULES / "crontab").read_text(encoding="utf-8").replace(PATH, str(project.folder))
    *settings, line = (line for line in text.splitlines() if line and not line.startswith("#"))
    schedule, command = re.fullmatch(r"(17 3 \* \* 0)  (.*)", line).groups()  # type: ignore[union-attr]
    assert "%" not in command, "which means a line's end to cron"
    env = {"PATH": os.environ["PATH"]} | dict(setting.split("=", 1) for setting in settings)
    done = subprocess.run(["/bin/sh", "-c", command], env=env, cwd="/", capture_output=True, text=True, check=False)
    assert project.calls() == [f"-m visual_grpo.retraining in {project.folder} with nothing"]
    assert "said by the retraining" in (project.folder / "data/retraining.log").read_text()
    told = f"said by the retraining\nThe retraining ended with exit code {code}.\n"
    assert (done.stdout, done.stderr) == ("" if code in (Code.DONE, Code.NOT_PROMOTED) else told, ""), schedule


def test_airflow_runs_the_pipelines_one_after_another_in_one_mlflow_run(monkeypatch: pytest.MonkeyPatch) -> None:
    chained: list[Any] = []

    class Dag:
        def __init__(self, **settings: Any) -> None:
            assert settings["max_active_runs"] == settings["max_active_tasks"] == 1

        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    names = ["airflow", "airflow.sdk", "airflow.providers"]
    names += [f"airflow.providers.standard{rest}" for rest in ("", ".operators", ".operators.bash")]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, found in {"DAG": Dag, "chain": lambda *tasks: chained.extend(tasks)}.items():
        monkeypatch.setattr(sys.modules["airflow.sdk"], name, found, raising=False)
    monkeypatch.setattr(sys.modules[names[-1]], "BashOperator", lambda **own: SimpleNamespace(**own), raising=False)
    monkeypatch.setenv("VISUAL_GRPO_PROJECT", "/project")
    runpy.run_path(str(SCHEDULES / "airflow.py"))
    assert [task.task_id for task in chained] == [*FLOW, "promote"]
    assert {task.task_id for task in chained} <= PIPELINES.keys()
    assert all(f"kedro run --pipeline={task.task_id}" in task.bash_command for task in chained)
    assert len({task.env.get("MLFLOW_RUN_ID") for task in chained[:-1]} - {None}) == 1
    assert chained[-1].env == {}, "it judges a training, and tracks nothing of it"
