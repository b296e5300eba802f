"""After an error in the middle of a training, the run resumes bit for bit from the checkpoint before."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.training.test_run import BOTH_STEPS, CHOICES, brightness, contents, execute, make_run, parameters, rows
from visual_grpo.common.errors import UserError
from visual_grpo.training.run import TrainingRun


class Failing:
    """`brightness` that raises an error from the ``at``-th call on, after it has drawn a random number; 0 = never."""

    def __init__(self, at: int) -> None:
        self.calls, self.at = 0, at

    def __call__(self, prompts: Any, images: Any) -> list[float]:
        self.calls += 1
        random.random()
        if self.calls >= self.at > 0:
            raise RuntimeError("the judge is away")
        return brightness(prompts, images)


def changes_of(policy: dict[str, Any], group_size: int, **more: Any) -> dict[str, Any]:
    return {
        "policy": {"signal_check": {"rollouts": 0}} | policy,
        "sampling": BOTH_STEPS,
        "grpo": {"steps": 3, "group_size": group_size},
        "modules": {"dit": {"group_size": 3, "learning_rate": 2e-3, "kl_weight": 0.02}} if "ar" not in policy else {},
        "evaluation": {"every": 2, "prompts": 2, "images_per_prompt": 1},
    } | more


def run_in(folder: Path, model: Path, changes: dict[str, Any], reward: Any, resume: str = "never") -> TrainingRun:
    tracking = {"checkpoint_every": 1, "checkpoints": str(folder / "checkpoints")}
    return make_run(parameters(folder, **changes, tracking=tracking, resume=resume), model, reward=reward)


def fails(run: TrainingRun, out: Path) -> list[str]:
    with pytest.raises((RuntimeError, UserError), match=r"the judge is away|out of memory"):
        execute(run, out)
    return [path.name for path in sorted(run.checkpoints.folder.glob("step-*"))]


def goes_on(run: TrainingRun, whole: TrainingRun, out: Path) -> None:
    random.seed(99)
    execute(run, out / "resumed")
    if not (out / "whole").exists():
        whole.write_adapters(out / "whole")
    assert contents(out / "resumed") == contents(out / "whole")
    assert rows(run) == rows(whole)


@CHOICES
def test_a_run_resumes_after_an_error_of_a_reward_in_any_rollout(
    pipeline_folder: Path, tmp_path: Path, policy: dict[str, Any], group_size: int
) -> None:
    changes, counted = changes_of(policy, group_size), Failing(at=0)
    whole = run_in(tmp_path / "whole", pipeline_folder, changes, counted)
    execute(whole, tmp_path / "out" / "whole")
    folders = {path.name for path in (tmp_path / "out" / "whole").iterdir()}
    assert folders == {"best", "last", "training.csv", "training.json", *whole.trainer.modules}
    rollouts = 2 if policy["train"] != "dit" and "stages" not in policy else 1
    assert counted.calls == 3 * rollouts + 2  # Evaluations at steps 2 and 3.
    for call in range(rollouts + 1, 2 * rollouts + 1):  # Of step 2.
        folder = tmp_path / f"call-{call}"
        assert fails(run_in(folder, pipeline_folder, changes, Failing(at=call)), folder) == ["step-000001"]
        goes_on(run_in(folder, pipeline_folder, changes, Failing(at=0), "auto"), whole, tmp_path / "out")


def test_a_checkpoint_that_is_there_is_the_newest(
    pipeline_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_in(tmp_path, pipeline_folder, changes_of({"train": "ar"}, 3), brightness)
    last, flush = run.checkpoints.folder / "step-000003", os.fsync

    def interrupted(descriptor: int) -> None:
        if last.exists():
            raise KeyboardInterrupt
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        execute(run, tmp_path / "out")
    assert run.checkpoints.newest == last
