"""A small training repeated from its commit with a user's commands: bit for bit, and what differs is named."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.models.families.sd3 import tiny as sd3
from tests.models.test_lora_files import write
from tests.operations.reproduction.repositories import commit, git
from tests.small_project import ROOT, environment, paste, small_project

pytestmark = pytest.mark.slow
SETTINGS = "parameters and code of rewards"
KILLER = ROOT / "tests/killer"
REPRODUCE = ".venv/bin/kedro run --pipeline=reproduce --params=run=latest"
PARAMS = "--params=seed=3,policy.train=ar"
# A training that is judged on fewer prompts than the baseline has.
TRAIN = f""".venv/bin/kedro run --pipelines=starter,data_preparation,baseline {PARAMS}
.venv/bin/kedro run --pipeline=train {PARAMS},evaluation.max_prompts=1"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained project in a repository whose code has gone on since; the training had an uncommitted change."""
    folder = small_project(tmp_path_factory.mktemp("reproduce") / "project")
    (folder / ".git/info").mkdir(parents=True)
    git(folder, "init", "-q")
    (folder / ".git/info/exclude").write_text(".venv\n")
    training = folder / "src/visual_grpo/training/run.py"
    text = training.read_text(encoding="utf-8")
    training.write_text("raise RuntimeError('the change is not applied')\n", encoding="utf-8")
    commit(folder)
    training.write_text(text, encoding="utf-8")
    done = paste(TRAIN, folder)
    assert done.returncode == 0, done.stderr[-2000:]
    training.write_text("raise RuntimeError('the code has gone on')\n", encoding="utf-8")
    commit(folder)
    return folder


def report(project: Path) -> dict[str, Any]:
    file = project / "data/08_reporting/reproduction.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()
    return found


def temporary() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("visual_grpo_reproduce_*"))


def test_a_training_is_made_again_bit_for_bit(project: Path) -> None:
    before, state = temporary(), git(project, "status", "--porcelain")
    database = (project / "mlflow.db").read_bytes()
    done = paste(REPRODUCE, project)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    found = report(project)
    assert (found["matches"], found["difference"]) == (True, None)
    results = {row["what"]: row["result"] for row in found["rows"]}
    assert {results[name] for name in ("commit", "uncommitted changes", "data", "seed", SETTINGS)} == {"equal"}
    assert {result for name, result in results.items() if name.startswith("adapter ")} == {"equal"}
    assert results["metrics"] == "equal"
    assert "every file of the adapters and every metric is the run's, bit for bit" in done.stdout
    assert not {"Next:", "--conf-source", "MLflow run"} & set(done.stdout.split())
    assert temporary() == before
    assert git(project, "worktree", "list").count("\n") == 0
    assert git(project, "status", "--porcelain") == state
    assert (project / "mlflow.db").read_bytes() == database, "nothing is logged where the user's runs are"


def test_a_training_from_other_adapters_that_was_killed_and_resumed_is_made_again(project: Path) -> None:
    """What it started from is where it then left its own, so that only MLflow has it."""
    adapters, training = project / "data/06_models/adapters", project / "src/visual_grpo/training/run.py"
    before, text = shutil.copytree(adapters, project / "before"), training.read_text(encoding="utf-8")
    train = ".venv/bin/kedro run --pipeline=train --params=seed=4,policy.train=ar,train.start=latest"
    try:
        shutil.copy(ROOT / "src/visual_grpo/training/run.py", training)
        killed = paste(f"KILL_AT=visual_grpo.grpo.checkpoint:remove_old:0 PYTHONPATH={KILLER}:src {train}", project)
        assert killed.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), killed.stderr[-2000:]
        assert [path.name for path in (project / "data/06_models/checkpoints").glob("step-*")] == ["step-000001"]
        done = paste(f"{train},resume=auto", project)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "Resuming after step 1 of 2" in done.stdout
        repeated = paste(REPRODUCE, project)
        assert repeated.returncode == 0, repeated.stdout[-3000:] + repeated.stderr[-2000:]
    finally:
        training.write_text(text, encoding="utf-8")
        shutil.rmtree(adapters)
        before.rename(adapters)
    found = report(project)
    assert found["matches"]
    results = {row["what"]: row["result"] for row in found["rows"]}
    assert (results["adapters at the start"], results["metrics"]) == ("equal", "equal")
    assert {result for name, result in results.items() if name.startswith("adapter ")} == {"equal"}


def test_a_signal_leaves_neither_process_nor_worktree(project: Path) -> None:
    before, number = temporary(), signal.SIGTERM
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(REPRODUCE.split(), cwd=project, env=environment(project), **pipes) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "generate_baseline" in line:
                break
        [place] = temporary() - before
        assert _working_in(place)
        process.send_signal(number)
        process.stdout.read()
    assert process.returncode == 128 + number
    deadline = time.monotonic() + 10
    while _working_in(place) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _working_in(place)
    assert temporary() == before
    assert git(project, "worktree", "list").count("\n") == 0


def _working_in(folder: Path) -> bool:
    """Whether a process has its working folder below ``folder``."""
    for entry in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if entry.readlink().is_relative_to(folder):
                return True
    return False


@pytest.mark.parametrize(
    ("parameter", "what", "said"),
    [
        ("train.start", "adapters at the start", "The adapters that the run started from (theirs.safetensors, "),
        ("model.lora", "LoRA in the base model", "model.lora: theirs.safetensors is not the LoRA that the run's base"),
    ],
)
def test_a_training_with_a_lora_of_a_different_program_is_made_again(
    parameter: str, what: str, said: str, tmp_path: Path
) -> None:
    project = small_project(tmp_path / "project")
    pipeline = sd3.pipeline()
    pipeline.save_pretrained(project / "small_sd3")
    write("diffusers sd3", pipeline, project / "theirs.safetensors")
    (project / "prompts.txt").write_text("".join(f"a sign in row {number}\n" for number in range(20)))
    file = project / "conf/sd3/parameters.yml"
    tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    tree |= {"output": "data", "reward": "listed", "rewards": {"edge_density": {"weight": 1.0}}}
    tree["data"] |= {"path": "prompts.txt"}
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    (project / ".git/info").mkdir(parents=True)
    git(project, "init", "-q")
    (project / ".git/info/exclude").write_text(".venv\nsmall_sd3\ntheirs.safetensors\n")
    commit(project)
    kedro = ".venv/bin/kedro run --env=sd3"
    given = f"--params={parameter}=theirs.safetensors"
    before = given if parameter == "model.lora" else ""
    commands = f"{kedro} --pipelines=starter,data_preparation,baseline {before}\n{kedro} --pipeline=train {given}"
    done = paste(commands, project)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    repeated = paste(REPRODUCE, project)
    assert repeated.returncode == 0, repeated.stdout[-3000:] + repeated.stderr[-2000:]
    results = {row["what"]: row["result"] for row in report(project)["rows"]}
    assert (results[what], results["metrics"]) == ("equal", "equal")
    assert {result for name, result in results.items() if name.startswith("adapter ")} == {"equal"}
    (project / "theirs.safetensors").write_bytes(b"other")
    gone = paste(REPRODUCE, project)
    assert gone.returncode == 1
    assert said in gone.stderr
