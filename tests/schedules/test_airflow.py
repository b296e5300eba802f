"""The DAG that Airflow runs: made of the project's pipelines, and one MLflow run whatever number of processes."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from kedro.framework.startup import bootstrap_project

from tests.small_project import ROOT, environment, small_project
from visual_grpo.config.outputs import FLOW
from visual_grpo.pipeline_registry import register_pipelines

FOLDER = ROOT / "schedules/airflow"
DAG = FOLDER / "dags/visual_grpo_dag.py"
AIRFLOW = ROOT / ".venv-airflow"


def create(folder: Path, *options: str) -> str:
    """What `make airflow-dag` writes."""
    template = f"--jinja-file={FOLDER / 'dag.py.j2'}"
    words = [sys.executable, "-m", "kedro", "airflow", "create", template, f"--target-dir={folder}", *options]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [file] = folder.glob("*.py")
    return file.read_text(encoding="utf-8")


def test_the_dag_is_that_of_the_present_pipelines(tmp_path: Path) -> None:
    pytest.importorskip("kedro_airflow")
    assert create(tmp_path) == DAG.read_text(encoding="utf-8"), "write it again: make airflow-dag"


def test_another_environment_has_a_dag_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("kedro_airflow")
    text = create(tmp_path, "--env=text")
    assert 'dag_id="visual_grpo_text"' in text
    assert "--env=text" in text
    assert "--env=local" not in text


def test_each_pipeline_is_a_task_after_those_whose_data_it_reads() -> None:
    tree = ast.parse(DAG.read_text(encoding="utf-8"))
    shifts = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.RShift)]
    before = {ast.unparse(shift.right): ast.unparse(shift.left) for shift in shifts}
    assert before == {
        "data_preparation": "[starter]",
        "baseline": "[data_preparation, starter]",
        "train": "[baseline, data_preparation, starter]",
        "evaluate": "[baseline, data_preparation, starter, train]",
        "promote": "evaluate",
    }
    calls = [ast.unparse(node.value) for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    tasks = [call for call in calls if call.startswith("kedro(")]
    assert [task.split("'")[1] for task in tasks] == [*FLOW, "promote"]
    assert [task for task in tasks if "variables=TRACKED" not in task] == ["kedro('promote')"]


def test_a_node_of_the_whole_flow_has_its_pipelines_name_as_its_tag() -> None:
    bootstrap_project(ROOT)
    found = register_pipelines()
    for node in found["__default__"].nodes:
        [name] = node.tags
        assert node.name in {own.name for own in found[name].nodes}


def test_airflow_listens_to_this_machine_only_and_tells_nobody(tmp_path: Path) -> None:
    stand_in(tmp_path, 'env\necho "$@"\n')
    words = [str(tmp_path / "schedules/airflow/run"), "dags", "list"]
    env = {"PATH": os.environ["PATH"], "PORT": "9090"}
    lines = subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[-1] == "dags list"
    assert set(lines) >= {
        "AIRFLOW__API__HOST=127.0.0.1",
        "AIRFLOW__API__PORT=9090",
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED=False",
        f"AIRFLOW_HOME={tmp_path}/.airflow",
        f"AIRFLOW__CORE__DAGS_FOLDER={tmp_path}/schedules/airflow/dags",
    }


def test_no_server_of_logs_is_started_and_one_part_that_ends_ends_all(tmp_path: Path) -> None:
    """The log servers listen to every machine, whatever is configured."""
    stand_in(
        tmp_path,
        'echo "$@" >> calls\ncase $1 in scheduler | dag-processor) exec sleep 60;; api-server) sleep 1;; esac\n',
    )
    began = time.monotonic()
    subprocess.run([tmp_path / "schedules/airflow/start"], cwd=tmp_path, env={"PATH": os.environ["PATH"]}, check=True)
    assert time.monotonic() - began < 30
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == "db migrate"
    assert sorted(calls[1:]) == ["api-server", "dag-processor", "scheduler --skip-serve-logs"]


def stand_in(project: Path, script: str) -> None:
    """The files of this folder, and a program in Airflow's place."""
    shutil.copytree(FOLDER, project / "schedules/airflow")
    program = project / ".venv-airflow/bin/airflow"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}")
    program.chmod(0o755)


@pytest.mark.slow
@pytest.mark.skipif(not (AIRFLOW / "bin/airflow").exists(), reason="needs Airflow: make airflow-test installs it")
def test_a_run_of_the_dag_is_one_run_in_mlflow(tmp_path: Path) -> None:
    """Of six tasks, five track: each is a separate process."""
    from mlflow import MlflowClient

    project = small_project(tmp_path / "project")
    (project / ".venv-airflow").symlink_to(AIRFLOW)
    for words in (["db", "migrate"], ["dags", "test", "visual_grpo"]):
        done = subprocess.run(
            ["schedules/airflow/run", *words],
            cwd=project,
            env=environment(project),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-5000:]
    client = MlflowClient(f"sqlite:///{project}/mlflow.db")
    [run] = client.search_runs([found.experiment_id for found in client.search_experiments()])
    assert run.info.run_name.startswith("airflow manual__")
    assert run.info.status == "FINISHED"
    assert {"reward/total", "result/gain"} <= set(run.data.metrics)
    assert not [name for name in run.data.tags if name.startswith("resumed.")]
    steps = yaml.safe_load((project / "conf/base/parameters.yml").read_text())["grpo"]["steps"]
    assert len(client.get_metric_history(run.info.run_id, "reward/total")) == steps
