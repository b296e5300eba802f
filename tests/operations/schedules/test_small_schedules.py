"""The line for cron, the units of systemd and the DAG for Airflow: what they call, and how a failure is told."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.small_project import ROOT
from visual_grpo.config.pipelines import DATA_FLOW
from visual_grpo.operations.retraining.job import PATIENCE, Code
from visual_grpo.pipeline_registry import NAMES

SCHEDULES = ROOT / "schedules"
PATH = "/path/to/visual-grpo"
"""What a user replaces."""
PYTHON = """#!/bin/bash
echo "$@" >> calls
echo "said by the retraining"
exit CODE
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder in which the retraining is a program that ends with ``CODE``."""
    python = tmp_path / "a project/.venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    (tmp_path / "a project/data").mkdir()
    return tmp_path / "a project"


@pytest.mark.parametrize("code", sorted(Code))
def test_cron_logs_everything_and_mails_the_end_of_it_after_a_failure(project: Path, code: int) -> None:
    (project / ".venv/bin/python").write_text(PYTHON.replace("CODE", str(int(code))))
    text = (SCHEDULES / "crontab").read_text(encoding="utf-8").replace(PATH, str(project))
    *settings, line = (line for line in text.splitlines() if line and not line.startswith("#"))
    schedule, command = re.fullmatch(r"(17 3 \* \* 0)  (.*)", line).groups()  # type: ignore[union-attr]
    assert "%" not in command, "which means a line's end to cron"
    env = {"PATH": os.environ["PATH"]} | dict(setting.split("=", 1) for setting in settings)
    done = subprocess.run(["/bin/sh", "-c", command], env=env, cwd="/", capture_output=True, text=True, check=False)
    assert (project / "calls").read_text() == "-m visual_grpo.operations.retraining\n"
    assert "said by the retraining" in (project / "data/retraining.log").read_text()
    told = f"said by the retraining\nThe retraining ended with exit code {code}.\n"
    assert (done.stdout, done.stderr) == ("" if code in (Code.DONE, Code.NOT_PROMOTED) else told, ""), schedule


def test_systemds_service_knows_the_commands_exit_codes_and_patience() -> None:
    unit = ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string((SCHEDULES / "systemd/visual-grpo-retrain.service").read_text(encoding="utf-8"))
    service = unit["Service"]
    assert [int(code) for code in service["SuccessExitStatus"].split()] == [Code.NOT_PROMOTED, 128 + 15]
    assert float(service["TimeoutStopSec"]) > PATIENCE
    assert (service["Type"], service["KillMode"]) == ("oneshot", "mixed")
    assert service["TimeoutStartSec"] == "infinity", "a training takes longer than systemd waits for other services"
    assert service["WorkingDirectory"] == PATH


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_accepts_the_units(project: Path, tmp_path: Path) -> None:
    folder = project.rename(project.with_name("R&D #1 é' %h"))
    shutil.copy(SCHEDULES.parent / "Makefile", folder)
    shutil.copytree(SCHEDULES / "systemd", folder / "schedules/systemd")
    env = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    subprocess.run(["make", "--old-file=setup", "schedule-systemd"], cwd=folder, env=env, check=True)
    units = tmp_path / "systemd/user"
    place = str(folder).replace("%", "%%")
    assert f"WorkingDirectory={place}\n" in (units / "visual-grpo-retrain.service").read_text()
    words = ["systemd-analyze", "verify", "--user", "--man=no", *sorted(map(str, units.iterdir()))]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ['a "b"', "a\\b", "a $HOME", "a\nExecStart=b", "a ", "a\\"])
def test_a_folder_that_a_unit_cannot_name_is_refused(name: str, project: Path, tmp_path: Path) -> None:
    folder = project.rename(project.with_name(name))
    shutil.copy(SCHEDULES.parent / "Makefile", folder)
    shutil.copytree(SCHEDULES / "systemd", folder / "schedules/systemd")
    words, env = ["make", "--old-file=setup", "schedule-systemd"], os.environ | {"XDG_CONFIG_HOME": str(tmp_path)}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "Rename the folder" in done.stderr
    assert "Wrote" not in done.stdout
    assert not (tmp_path / "systemd").exists()


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
    assert [task.task_id for task in chained] == [*DATA_FLOW, "promote"]
    assert {task.task_id for task in chained} <= set(NAMES)
    assert all(f"kedro run --pipeline={task.task_id}" in task.bash_command for task in chained)
    assert len({task.env.get("MLFLOW_RUN_ID") for task in chained[:-1]} - {None}) == 1
    assert chained[-1].env == {}, "it judges a training, and tracks nothing of it"
    assert chained[-1].skip_on_exit_code == Code.NOT_PROMOTED
