"""SIGKILL at many moments: what a training leaves in the end is what one leaves that nobody killed, bit for bit.

`make test-kill` kills each kind of training 10 times, `make test-slow` one kind 6 times.
"""

from __future__ import annotations

import random
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pandas as pd
import pytest
from mlflow import MlflowClient

from tests.small_project import environment, paste, small_project

KINDS = {
    "ar": ("", "policy.train=ar"),
    "dit": ("", "policy.train=dit"),
    "alternating": ("", "policy.train=all"),
    "joint": ("", "policy.train=all,policy.stages=joint"),
    # With fewer records none would be left for evaluations, in which it is killed too.
    "vl": ("negative_points", "starter.records_per_prompt=6"),
    "sd3": ("sd3_small", ""),
}
"""Name -> environment and parameters."""
STEPS = 60
COMMON = (
    f"grpo.steps={STEPS},policy.signal_check.rollouts=3,evaluation.every=3,tracking.images_every=3,"
    "tracking.checkpoint_every=2"
)
FIRST = "visual_grpo.grpo.signal_check:measure_signal:0.05"
LAST = (
    "visual_grpo.training.run:TrainingRun.write_adapters:0",
    "visual_grpo.training.run:TrainingRun.write_adapters:0.02",
)
WITHIN = (
    "visual_grpo.grpo.checkpoint:save_checkpoint",
    "visual_grpo.grpo.checkpoint:remove_old",
    "visual_grpo.training.run:TrainingRun.evaluate",
    "visual_grpo.tracking.mlflow_api:log_metrics",
)
TRAINING = "visual_grpo.training.run:TrainingRun._train"
OF_TIME_AND_MEMORY = re.compile(r"(.*/)?(seconds|speed)/.*|(.*/)?memory_gb")


def moments(kills: int, generator: random.Random) -> list[str]:
    """Where each process is killed: the first in the signal check, the last two when they save the adapters, the
    others within a named function and at random moments in turn."""
    between = []
    for number in range(kills - 1 - len(LAST)):
        function, longest = (WITHIN[number // 2 % len(WITHIN)], 0.03) if number % 2 else (TRAINING, 2.0)
        between.append(f"{function}:{generator.uniform(0, longest):.4f}")
    return [FIRST, *between, *LAST]


@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        *(pytest.param(kind, 10, marks=pytest.mark.kill) for kind in KINDS),
        pytest.param("alternating", 6, marks=pytest.mark.slow),
    ],
)
def test_kills_change_no_bit(tmp_path: Path, kind: str, kills: int) -> None:
    prepared, whole, killed = (tmp_path / name for name in ("prepared", "whole", "killed"))
    succeed(command(kind, "starter,data_preparation,baseline"), small_project(prepared))
    for copy in (whole, killed):  # Without the database, which names the folder it was made in.
        shutil.copytree(prepared, copy, symlinks=True, ignore=shutil.ignore_patterns("mlflow.db*"))
    succeed(command(kind, "train"), whole)
    for number, moment in enumerate(moments(kills, random.Random(kind))):
        done = run(command(kind, "train", resume=number > 0), killed, moment)
        said = (done.stdout + done.stderr)[-3000:]
        assert done.returncode == -signal.SIGKILL, f"{moment} was not reached: exit code {done.returncode}\n{said}"
    succeed(command(kind, "train", resume=True), killed)
    assert adapters(killed) == adapters(whole)
    pd.testing.assert_frame_equal(history(killed), history(whole), check_exact=True)
    assert metrics(killed) == metrics(whole)


def command(kind: str, pipelines: str, *, resume: bool = False) -> str:
    env, params = KINDS[kind]
    params = ",".join(filter(None, [COMMON, params, "resume=auto" if resume else ""]))
    return f".venv/bin/kedro run{f' --env={env}' if env else ''} --pipelines={pipelines} --params={params}"


def succeed(line: str, project: Path) -> None:
    done = paste(line, project)
    assert done.returncode == 0, done.stderr[-2000:]


def run(line: str, project: Path, moment: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(__file__).parent / 'killer'}:{environment(project)['PYTHONPATH']}"
    variables = environment(project) | {"KILL_AT": moment, "PYTHONPATH": path}
    return subprocess.run(line.split(), cwd=project, env=variables, capture_output=True, text=True, check=False)


def adapters(project: Path) -> dict[str, bytes]:
    [folder] = project.glob("data/**/06_models/adapters")
    found = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.safetensors")}
    assert found
    return found


def history(project: Path) -> pd.DataFrame:
    [file] = project.glob("data/**/08_reporting/training.csv")
    table = pd.read_csv(file)
    return table[[name for name in table if not OF_TIME_AND_MEMORY.fullmatch(str(name))]]


def metrics(project: Path) -> dict[str, list[tuple[int, str]]]:
    """Name -> (step, value) of every row in MLflow of the one run that was finished."""
    client = MlflowClient(f"sqlite:///{project / 'mlflow.db'}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    trained = [run for run in client.search_runs(experiments) if "eval/total" in run.data.metrics]
    [finished] = [run for run in trained if run.info.status == "FINISHED"]
    assert {run.info.status for run in trained} <= {"FINISHED", "KILLED"}
    names = sorted(name for name in finished.data.metrics if not OF_TIME_AND_MEMORY.fullmatch(name))
    rows = {name: client.get_metric_history(finished.info.run_id, name) for name in names}
    # As texts: a verdict that is not there yet is NaN, which equals nothing.
    return {name: sorted((row.step, str(row.value)) for row in own) for name, own in rows.items()}
