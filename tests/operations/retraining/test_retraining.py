"""The retrain command in a small project, with what follows it: reproduce, promote, roll back, `dvc repro`."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient

from tests.operations.reproduction.repositories import commit, git
from tests.small_project import environment, merged, paste, small_project
from visual_grpo.operations.retraining.job import Code

pytestmark = pytest.mark.slow

KILLER = Path(__file__).parents[2] / "killer"
REWARD = """
def brightness(prompts, images):
    return [SIGN * float(image.float().mean()) / 255 for image in images]
"""
LEARNS: dict[str, Any] = {
    "reward": None,
    "rewards": {"brightness": {"function": "bright:brightness", "weight": 1.0}},
    "starter": {"vae_steps": 120},
    "policy": {"train": "dit", "lora": {"rank": 8, "alpha": 512}},
    "modules": {"dit": {"learning_rate": 0.05, "kl_weight": 0.0}},
    "grpo": {"steps": 4, "group_size": 4, "prompts_per_step": 4},
    "evaluation": {"controls": []},
    "promotion": {"max_guard_fall": 1.0},
}
"""Few steps of it make every picture brighter, and the pictures emptier, which the gate is told not to mind."""


def configure(project: Path, **changes: Any) -> None:
    file = project / "conf/local/parameters.yml"
    before = yaml.safe_load(file.read_text()) if file.is_file() else {}
    file.write_text(yaml.safe_dump(merged(before, changes)))


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with data and baseline, in which nothing was trained yet."""
    project = small_project(tmp_path_factory.mktemp("begun") / "project")
    (project / "bright.py").write_text(REWARD.replace("SIGN", "1"))
    configure(project, **LEARNS)
    git(project, "init", "--quiet")
    commit(project)
    call(project, ".venv/bin/python -m visual_grpo.operations.retraining.project")
    call(project, ".venv/bin/dvc repro baseline")
    return project


def copied(begun: Path, folder: Path) -> Path:
    """Without MLflow's database, which names the folder that its artifacts are in."""
    ignored = shutil.ignore_patterns("mlflow.db", "mlartifacts")
    return Path(shutil.copytree(begun, folder / "project", symlinks=True, ignore=ignored))


@pytest.fixture
def project(begun: Path, tmp_path: Path) -> Path:
    return copied(begun, tmp_path)


def call(project: Path, line: str) -> str:
    """What a command prints, which must succeed."""
    done = paste(line, project)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def retrain(project: Path, kill_at: str | None = None, option: str = "") -> tuple[int, str]:
    """Exit code and output; killed at ``module:function:seconds``."""
    killed = "" if kill_at is None else f"KILL_AT={kill_at} PYTHONPATH={KILLER}:$PYTHONPATH "
    done = paste(f"{killed}exec .venv/bin/python -m visual_grpo.operations.retraining {option} 2>&1", project)
    return done.returncode, done.stdout


def state(project: Path) -> dict[str, Any]:
    """What a retraining leaves: the champion, its versions, the adapters, the decision."""
    client = MlflowClient(f"sqlite:///{project / 'mlflow.db'}")
    versions = client.search_model_versions("name = 'visual_grpo'")
    model = client.get_registered_model("visual_grpo")
    decision = json.loads((project / "data/08_reporting/promotion.json").read_text())
    files = (project / "data/06_models/adapters").glob("*/*.safetensors")
    return {
        "champion": model.aliases,
        "versions": sorted((v.version, v.tags["weights.digest"]) for v in versions),
        "gates": sorted((tag, value.split()[1:]) for tag, value in model.tags.items()),
        "adapters": {file.name: file.read_bytes() for file in files},
        "decision": [decision["promoted"], decision["version"], decision["candidate"]["digest"]],
    }


def test_three_retrainings_then_reproduce_promote_roll_back_and_repeat(project: Path) -> None:
    configure(project, retrain={"commit": "retraining", "notify": "cat >> told.jsonl"})
    code, printed = retrain(project)
    assert code == Code.DONE, printed
    assert "models:/visual_grpo@champion is version 1 now." in printed
    assert git(project, "log", "-1", "--format=%s", "retraining").startswith("Retrained: Promoted")
    assert "train:" in git(project, "show", "retraining:dvc.lock")
    first = state(project)

    code, printed = retrain(project)
    assert code == Code.DONE
    assert printed.splitlines()[-1].startswith("Retraining of visual_grpo: nothing to do:")
    assert state(project) == first
    told = [json.loads(line) for line in (project / "told.jsonl").read_text().splitlines()]
    assert [(summary["outcome"], summary["version"]) for summary in told] == [("done", 1)]

    (project / "bright.py").write_text(REWARD.replace("SIGN", "-1"))
    code, printed = retrain(project)
    assert code == Code.NOT_PROMOTED, printed
    assert "Running stage 'data_preparation'" not in printed
    assert "Running stage 'train'" in printed
    assert "was trained with a different reward than the champion (code of reward brightness)" in printed
    assert state(project)["champion"] == first["champion"]
    assert retrain(project)[0] == Code.DONE, "what was judged is not judged again"
    assert paste(".venv/bin/kedro run --pipeline=promote", project).returncode == Code.NOT_PROMOTED
    assert re.findall("Running stage '(.*)'", call(project, ".venv/bin/dvc repro")) == ["parameters"]

    run_id = json.loads((project / "data/06_models/adapters/training.json").read_text())["mlflow_run_id"]
    printed = call(project, f".venv/bin/kedro run --pipeline=reproduce --params=run={run_id}")
    assert "every file of the adapters and every metric is the run's, bit for bit" in printed

    printed = call(project, ".venv/bin/kedro run --pipeline=promote --params=promotion.new_reward=true")
    assert "models:/visual_grpo@champion is version 2 now." in printed
    call(project, ".venv/bin/python -m visual_grpo.operations.lineage visual_grpo@champion")
    printed = call(project, ".venv/bin/kedro run --pipeline=rollback")
    assert "models:/visual_grpo@champion is version 1 again, as before version 2." in printed
    assert state(project)["champion"] == first["champion"]


def test_another_environment_is_retrained_at_the_first_try(project: Path) -> None:
    (project / "conf/nightly").mkdir()
    shutil.copy(project / "conf/local/parameters.yml", project / "conf/nightly")
    (project / "conf/local/parameters.yml").unlink()
    printed = call(project, ".venv/bin/python -m visual_grpo.operations.retraining --env=nightly")
    assert "models:/visual_grpo-nightly@champion is version 1 now." in printed
    assert (project / "conf/nightly/dvc.lock").is_file()
    printed = call(project, ".venv/bin/python -m visual_grpo.operations.retraining --env=nightly")
    assert "nothing to do" in printed


@pytest.fixture(scope="module")
def undisturbed(begun: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a retraining leaves that nobody killed."""
    project = copied(begun, tmp_path_factory.mktemp("undisturbed"))
    code, printed = retrain(project)
    assert code == Code.DONE, printed
    return state(project)


@pytest.mark.parametrize(
    "moment",
    [
        "visual_grpo.operations.retraining.job:Retraining._changed:0",
        "visual_grpo.training.run:TrainingRun._train:1.0",
        "visual_grpo.pipelines.promote:judge:2.0",
        "visual_grpo.pipelines.promote:promote:0.1",
    ],
)
def test_killed_at_any_stage_and_called_again_it_ends_in_the_same_state(
    project: Path, undisturbed: dict[str, Any], moment: str
) -> None:
    code, printed = retrain(project, moment)
    assert code in (-signal.SIGKILL, Code.FAILED), printed
    code, printed = retrain(project)
    assert code == Code.DONE, printed
    assert state(project) == undisturbed


def test_data_that_are_unlike_the_champions_are_refused_before_anything_is_trained(project: Path) -> None:
    configure(project, data={"eval_share": 0.2}, retrain={"data": {"min_records": 100_000}})
    code, printed = retrain(project)
    assert code == Code.DATA_REFUSED, printed
    assert "150 usable records, expected at least 100000 (retrain.data.min_records)." in printed
    assert not (project / "data/06_models/adapters").exists()


def is_locked(file: Path) -> bool:
    return file.is_file() and bool(subprocess.run(["flock", "--nonblock", str(file), "true"], check=False).returncode)


def test_a_second_call_at_the_same_time_ends_at_once(project: Path) -> None:
    configure(project, retrain={"monitor": {"command": "sleep 30; echo 1"}})
    (project / "data/08_reporting").mkdir(exist_ok=True)
    running = subprocess.Popen(
        [".venv/bin/python", "-m", "visual_grpo.operations.retraining"],
        cwd=project,
        env=environment(project),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not is_locked(project / "data/.retraining.lock"):
            assert running.poll() is None
        second = [retrain(project, option=option) for option in ("", "--dry-run")]
    finally:
        running.send_signal(signal.SIGTERM)
        ended = running.wait()
    for code, printed in second:
        assert code == Code.BUSY
        assert f"already running: data is in use by another command, process {running.pid} on" in printed
    assert ended == 128 + signal.SIGTERM
