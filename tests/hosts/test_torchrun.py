"""Trainings by processes that torchrun has started on two hosts, which are this machine twice."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.hosts.launchers import HOST, SECRET, Hosts
from tests.sharing.test_policy import is_there
from tests.sharing.test_trainings import LEARNED, ROW_BY_ROW
from tests.small_project import paste, small_project

LAUNCH = f".venv/bin/torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint={HOST}"
COMMON = "grpo.prompts_per_step=3,grpo.group_size=4,policy.train=all"
LONG = f"{COMMON},grpo.steps=60,grpo.schedule=constant,tracking.checkpoint_every=1,evaluation.every=0"
ADAPTERS, CHECKPOINTS = "data/06_models/adapters", "data/06_models/checkpoints"


def command(program: str, pipelines: str, params: str) -> str:
    return f"{program} run --pipelines={pipelines} --params={params}"


def of_hosts(pipelines: str, params: str, options: str = "") -> str:
    return command(f"{LAUNCH} {options} -m visual_grpo.hosts", pipelines, params)


def of_one(pipelines: str, params: str) -> str:
    return command(".venv/bin/kedro", pipelines, params)


def prepare(project: Path, params: str) -> Path:
    small_project(project)
    done = paste(of_one("starter,data_preparation,baseline", params), project)
    assert done.returncode == 0, done.stderr[-2000:]
    return project


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("prepared") / "project", COMMON)


@pytest.fixture
def project(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "project", symlinks=True))


def weights(project: Path) -> dict[str, object]:
    files = sorted((project / ADAPTERS / "last").rglob("*.safetensors"))
    return {f"{file.name}/{name}": value for file in files for name, value in load_file(file).items()}


@pytest.mark.slow
def test_two_hosts_train_and_judge_what_one_process_does(tmp_path: Path) -> None:
    project = prepare(tmp_path / "project", f"{COMMON},{LEARNED}")
    params = f"{COMMON},{LEARNED},{ROW_BY_ROW},grpo.steps=3"
    done = paste(of_one("train", params), project)
    assert done.returncode == 0, done.stderr[-2000:]
    alone = weights(project)
    with Hosts(of_hosts("train,evaluate", params), project) as hosts:
        outputs = hosts.outputs(600)
        assert [launcher.returncode for launcher in hosts.launchers] == [0, 0], outputs
    together = weights(project)
    assert alone.keys() == together.keys()
    assert max(float((alone[name] - together[name]).abs().max()) for name in alone) < 1e-5  # type: ignore[operator]
    first, second = sorted(outputs, key=lambda own: -len(own[0]))
    assert second == ("", "")
    assert "6 of 6" in first[0]
    assert "make ui" in first[0]
    for file in project.rglob("*"):
        if file.is_file() and not file.is_relative_to(project / ".venv"):
            assert SECRET.encode() not in file.read_bytes(), file


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["other rank", "its torchrun", "rank 0", "torchrun of rank 0"])
def test_whoever_is_killed_all_end_and_the_training_goes_on_later(project: Path, victim: str) -> None:
    with Hosts(of_hosts("train", LONG), project) as hosts:
        hosts.wait_for(lambda: list((project / CHECKPOINTS).glob("step-*")))
        ranks, leader = hosts.ranks(), hosts.leader()
        assert sorted(ranks.values()) == [0, 1]
        pids = {
            "other rank": next(pid for pid, rank in ranks.items() if rank == 1),
            "its torchrun": hosts.launchers[1 - leader].pid,
            "rank 0": next(pid for pid, rank in ranks.items() if rank == 0),
            "torchrun of rank 0": hosts.launchers[leader].pid,
        }
        os.kill(pids[victim], signal.SIGKILL)
        killed = time.monotonic()
        outputs = hosts.outputs(60)
        while any(is_there(pid) for pid in ranks) and time.monotonic() < killed + 60:
            time.sleep(0.1)
        assert time.monotonic() - killed < 30
        assert 0 not in [launcher.returncode for launcher in hosts.launchers]
    said = "".join(outputs[leader])
    if victim == "other rank":
        assert "Process 2 (rank 1 on " in said
        assert "is gone" in said
    if victim in ("other rank", "its torchrun"):
        assert "-m visual_grpo.hosts run --pipeline=train --params=" in said
        assert "resume=auto" in said
    steps = max(int(file.name.split("-")[1]) for file in (project / CHECKPOINTS).glob("step-*")) + 1
    done = paste(of_one("train", f"resume=auto,distributed.processes=1,grpo.steps={steps}"), project)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_torchrun_starts_all_again_and_they_go_on_from_the_checkpoint(project: Path) -> None:
    line = of_hosts("train", LONG.replace("grpo.steps=60", "grpo.steps=12,resume=auto"), "--max-restarts=1")
    with Hosts(line, project) as hosts:
        hosts.wait_for(lambda: list((project / CHECKPOINTS).glob("step-*")))
        ranks = hosts.ranks()
        os.kill(next(pid for pid, rank in ranks.items() if rank == 1), signal.SIGKILL)
        outputs = hosts.outputs(600)
        assert [launcher.returncode for launcher in hosts.launchers] == [0, 0], outputs
        assert not any(is_there(pid) for pid in ranks)
    said = "".join(stdout for stdout, _ in outputs)
    assert "Trained 12 steps" in said
    assert said.count("1 of 1: train") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("secrets", "said"),
    [
        ((SECRET, "an entirely other one"), "another VISUAL_GRPO_SECRET|rank 1 on .* cannot reach|has another secret"),
        ((SECRET, None), "VISUAL_GRPO_SECRET is not set, but the processes are on several hosts"),
    ],
    ids=["another", "none"],
)
def test_hosts_without_the_same_secret_do_nothing(
    project: Path, secrets: tuple[str, str | None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VISUAL_GRPO_JOIN_SECONDS", "15")
    before = sorted(project.rglob("*"))
    with Hosts(of_hosts("train", LONG), project, secrets) as hosts:
        outputs = hosts.outputs(90)
        assert 0 not in [launcher.returncode for launcher in hosts.launchers]
    import re

    assert re.search(said, "".join(stderr for _, stderr in outputs))
    made = [file for file in project.rglob("*") if file not in before and "__pycache__" not in file.parts]
    assert not made


@pytest.mark.slow
def test_processes_of_one_host_need_no_secret_and_wait_while_one_is_enough(project: Path) -> None:
    launch = ".venv/bin/torchrun --standalone --nproc-per-node=2 -m visual_grpo.hosts"
    line = command(launch, "data_preparation,train,evaluate", f"{COMMON},grpo.steps=2")
    with Hosts(line, project, [None]) as hosts:
        ((stdout, stderr),) = hosts.outputs(600)
        assert hosts.launchers[0].returncode == 0, stderr
    assert stderr == ""
    assert "3 of 3" in stdout or "evaluate" in stdout
