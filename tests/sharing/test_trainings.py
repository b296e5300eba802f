"""The command `train` with several processes: every kind of model, and a process that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.sharing.test_policy import is_there
from tests.small_project import environment, paste, small_project
from tests.test_kill import KINDS

COMMON = "grpo.steps=3,grpo.prompts_per_step=3,grpo.group_size=4"
LEARNED = "starter.vae_steps=150,starter.dit_steps=300,starter.ar_steps=100,starter.vl_steps=150"
"""A base model that has learned something: where samples tell nothing, what is left of their gradients is rounding."""
ROW_BY_ROW = "policy.denoise_batch=1,policy.decode_batch=1,policy.rollout_batch=1,grpo.micro_batch_size=1"
"""Matrix products of another number of rows are rounded in another way, and AdamW makes much of little."""

REPLAYED = "grpo.old_log_probs=replay"
"""A model in parts generates small models' tokens by other operations, which round in another way, and AdamW makes a
step of what rounding leaves of a gradient that nearly cancels."""


def command(kind: str, pipelines: str, more: str = "") -> str:
    env, params = KINDS[kind]
    given = ",".join(filter(None, [COMMON, params, more]))
    return f".venv/bin/kedro run{f' --env={env}' if env else ''} --pipelines={pipelines} --params={given}"


@pytest.fixture
def prepared(tmp_path: Path, kind: str) -> Path:
    project = small_project(tmp_path / "project")
    done = paste(command(kind, "starter,data_preparation,baseline", LEARNED), project)
    assert done.returncode == 0, done.stderr[-2000:]
    return project


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_and_three_processes_train_what_one_does(prepared: Path, kind: str) -> None:
    output = max(
        (folder.parent for folder in prepared.glob("data/**/05_model_input")), key=lambda path: len(path.parts)
    )
    for first, *others in (("1", "2", "3"), (f"1,{REPLAYED}", f"2,{REPLAYED},distributed.sharded=true")):
        alone = _trained(prepared, output, kind, first)
        moved = [bool(value.any()) for name, value in alone.items() if "lora_B" in name]
        assert sum(moved) > 0.8 * len(moved), "nothing follows from a last block's text, but from all else"
        for processes in others:
            many = _trained(prepared, output, kind, processes)
            assert max(float((alone[name] - many[name]).abs().max()) for name in alone) < 1e-5, processes


def _trained(project: Path, output: Path, kind: str, processes: str) -> dict[str, Tensor]:
    """The tensors of the last adapters."""
    done = paste(command(kind, "train", f"{LEARNED},{ROW_BY_ROW},distributed.processes={processes}"), project)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (f"{processes[0]} processes train together." in done.stdout) == (processes[0] != "1")
    files = sorted((output / "06_models/adapters/last").rglob("*.safetensors"))
    return {f"{file}/{name}": value for file in files for name, value in load_file(file).items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["joint"])
@pytest.mark.parametrize("after", [0.0, 1.3, 2.1])
def test_a_killed_process_ends_the_command_and_the_training_goes_on_later(
    prepared: Path, kind: str, after: float
) -> None:
    line = command(kind, "train", f"{LEARNED},grpo.steps=60,distributed.processes=2,tracking.checkpoint_every=2")
    started = subprocess.Popen(
        ["bash", "-c", f"exec {line}"], cwd=prepared, env=environment(prepared), stderr=subprocess.PIPE, text=True
    )
    output = max(
        (folder.parent for folder in prepared.glob("data/**/05_model_input")), key=lambda path: len(path.parts)
    )
    checkpoints = output / "06_models/checkpoints"
    deadline = time.monotonic() + 120
    while not list(checkpoints.glob("step-*")) and started.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(after)
    others = _children(started.pid)
    assert others, "no other process is there"
    os.kill(others[0], signal.SIGKILL)
    killed = time.monotonic()
    _, said = started.communicate(timeout=60)
    assert time.monotonic() - killed < 30
    assert started.returncode == 1
    assert "was ended by SIGKILL" in said
    assert not any(is_there(pid) for pid in others)
    done = paste(
        command(kind, "train", f"{LEARNED},resume=auto,distributed.processes=1,grpo.steps=60").replace(COMMON, ""),
        prepared,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def _children(pid: int) -> list[int]:
    """The processes of a training that were spawned."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            is_worker = b"spawn_main" in file.read_bytes()
            parent = int((file.parent / "stat").read_text(encoding="utf-8").rpartition(") ")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
        if is_worker and parent == pid:
            found.append(int(file.parent.name))
    return found
