"""Commands with several processes: the same adapters from each kind of training, and one end for all."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.grpo.distributed.commands import (
    COMMON,
    LEARNED,
    LONG,
    REPRODUCIBLE,
    ROW_BY_ROW,
    Running,
    command,
    difference,
    prepare,
    weights,
)
from tests.small_project import paste
from tests.test_kill import KINDS


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_and_three_processes_train_what_one_does(kind: str, tmp_path: Path) -> None:
    project = tmp_path / "project"
    output = prepare(project, kind, LEARNED)
    trained = {}
    for processes in ("1", "2", "3", "2,distributed.sharded=true"):
        shared = "evaluation.every=0,train.ema_decay=0.5"  # The average holds all updates.
        params = f"{LEARNED},{ROW_BY_ROW},{shared},distributed.processes={processes}"
        done = paste(f"{REPRODUCIBLE} {command(kind, 'train', params)}", project)
        assert done.returncode == 0, done.stderr[-2000:]
        assert (f"{processes[0]} processes train together." in done.stdout) == (processes != "1")
        trained[processes] = weights(output)
    whole = trained["1"]
    moved = [bool(value.any()) for name, value in whole.items() if "lora_B" in name]
    assert sum(moved) > 0.8 * len(moved), "nothing follows from a last block's text, but from all else"
    differences = {processes: difference(whole, adapters) for processes, adapters in trained.items()}
    print(kind, differences)  # noqa: T201
    assert max(differences.values()) < 1e-5, differences


@pytest.mark.slow
def test_whatever_ends_one_process_ends_all_and_the_training_goes_on_with_another_number(tmp_path: Path) -> None:
    project = tmp_path / "project"
    checkpoints = prepare(project, "ar") / "06_models/checkpoints"
    line = command("ar", "train", f"{LONG},distributed.processes=2")
    said = {}
    for end, resume in (("other", "never"), ("first", "auto"), ("parent", "auto"), ("Ctrl-C", "auto")):
        before = set(checkpoints.glob("step-*"))
        with Running([f"{line},resume={resume}"], project) as running:
            running.wait_for(lambda before=before: set(checkpoints.glob("step-*")) - before)  # type: ignore[misc]
            (first,) = running.commands
            ranks = running.below(first.pid)
            assert len(ranks) == 2
            began = time.monotonic()
            if end == "Ctrl-C":
                os.killpg(first.pid, signal.SIGINT)  # As a terminal does.
            else:
                os.kill({"parent": first.pid, "first": ranks[0], "other": ranks[1]}[end], signal.SIGKILL)
            ((_, said[end]),) = running.ended(30)
            print(end, f"all had ended after {time.monotonic() - began:.1f} s")  # noqa: T201
            assert first.returncode == {"parent": -signal.SIGKILL, "Ctrl-C": 130}.get(end, 1)
    for end, number in (("first", 1), ("other", 2)):
        assert re.match(rf"Error: Process {number} of .* terminated with signal SIGKILL", said[end].splitlines()[-1])
    for processes in (1, 3):
        steps = max(int(file.name.split("-")[1]) for file in checkpoints.glob("step-*")) + 1
        more = f"{LONG},resume=auto,grpo.steps={steps},distributed.processes={processes}"
        done = paste(command("ar", "train", more).replace(COMMON, ""), project)
        assert done.returncode == 0, done.stderr[-2000:]
        assert f"Trained {steps} steps" in done.stdout
