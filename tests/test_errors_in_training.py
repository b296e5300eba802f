"""An error in the middle of a training costs nothing that was whole before it: the run goes on from there."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.test_training import BOTH_STEPS, CHOICES, brightness, contents, execute, ignore, make_run, parameters, rows
from visual_grpo.errors import UserError
from visual_grpo.run_checkpoints import RunCheckpoints
from visual_grpo.training import Callbacks, TrainingRun

SELDOM = {"checkpoint_every": 99, "checkpoint_minutes": 99}


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
    tracking = SELDOM | {"checkpoints": str(folder / "checkpoints")}
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
def test_an_error_of_a_reward_in_any_rollout_loses_no_step(
    pipeline_folder: Path, tmp_path: Path, policy: dict[str, Any], group_size: int
) -> None:
    changes, counted = changes_of(policy, group_size), Failing(at=0)
    whole = run_in(tmp_path / "whole", pipeline_folder, changes, counted)
    execute(whole, tmp_path / "out" / "whole")
    rollouts = 2 if policy["train"] != "dit" and "stages" not in policy else 1
    assert counted.calls == 3 * rollouts + 2  # Evaluations at steps 2 and 3.
    for call in range(rollouts + 1, 2 * rollouts + 1):  # Of step 2.
        folder = tmp_path / f"call-{call}"
        within = "" if call == rollouts + 1 else "-update-002"
        assert fails(run_in(folder, pipeline_folder, changes, Failing(at=call)), folder) == [f"step-000001{within}"]
        goes_on(run_in(folder, pipeline_folder, changes, Failing(at=0), "auto"), whole, tmp_path / "out")


def test_a_checkpoint_that_is_there_is_the_newest_also_if_ctrl_c_comes_before_its_folder_is_flushed(
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


class Breaking:
    """A policy's replay that runs out of memory when it is called the ``at``-th time."""

    def __init__(self, replay: Any, at: int) -> None:
        self.replay, self.calls, self.at = replay, 0, at

    def __call__(self, trajectory: Any, rows: Any) -> Iterator[Any]:
        self.calls += 1
        for chunk in self.replay(trajectory, rows):
            yield chunk
            if self.calls == self.at:
                raise RuntimeError("out of memory")


@pytest.mark.parametrize(("at", "checkpoint"), [(3, "step-000001"), (4, "step-000001-update-001")])
def test_an_error_in_an_update_loses_none_before_it(
    pipeline_folder: Path, tmp_path: Path, at: int, checkpoint: str
) -> None:
    changes = changes_of({"train": "ar"}, 3, modules={})
    whole = run_in(tmp_path / "whole", pipeline_folder, changes, brightness)
    execute(whole, tmp_path / "out" / "whole")
    broken = run_in(tmp_path / "broken", pipeline_folder, changes, brightness)
    policy = broken.trainer.modules["ar"].policy
    policy.replay = Breaking(policy.replay, at)  # type: ignore[method-assign]
    assert fails(broken, tmp_path) == [checkpoint]
    goes_on(run_in(tmp_path / "broken", pipeline_folder, changes, brightness, "auto"), whole, tmp_path / "out")


def test_an_error_within_the_optimiser_is_not_saved(pipeline_folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Some weights may have their new values, and others not."""
    run = run_in(tmp_path, pipeline_folder, changes_of({"train": "ar"}, 3, modules={}), brightness)
    step, calls = run.trainer.modules["ar"].optimizer.step, []

    def half(*args: Any) -> Any:
        calls.append(1)
        done = step(*args)
        if len(calls) == 4:
            raise RuntimeError("out of memory")
        return done

    monkeypatch.setattr(run.trainer.modules["ar"].optimizer, "step", half)
    assert fails(run, tmp_path) == []


def test_an_error_in_an_evaluation_saves_no_step_without_its_metrics(pipeline_folder: Path, tmp_path: Path) -> None:
    reward = Failing(at=3)  # Step 1, step 2, evaluation.
    run = run_in(tmp_path, pipeline_folder, changes_of({"train": "ar"}, 3, modules={}), reward)
    assert fails(run, tmp_path) == []


def test_what_cannot_be_saved_is_said_and_hides_no_error(
    pipeline_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    def full(checkpoints: RunCheckpoints) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(RunCheckpoints, "save", full)
    run = run_in(tmp_path, pipeline_folder, changes_of({"train": "ar"}, 3, modules={}), Failing(at=2))
    notes: list[str] = []
    with pytest.raises(UserError, match="the judge is away"):
        run.run(Callbacks(on_step=ignore, note=notes.append))
    assert notes == ["What was done since the start could not be saved: no space left on device"]
