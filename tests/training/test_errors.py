"""After an error in the middle of a training, the run resumes bit for bit from the checkpoint before."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.toys import CountingScorer
from tests.training.few_steps import brightness, parameters
from tests.training.test_run import contents, execute, make_run, rows
from tests.training.test_run_toys import TokenModel, token_run
from visual_grpo.common.errors import UserError
from visual_grpo.training.run import TrainingRun


class Failing:
    """`brightness` that raises an error at the ``at``-th call, after it has drawn a random number; 0 = never."""

    def __init__(self, at: int) -> None:
        self.calls, self.at = 0, at

    def __call__(self, prompts: Any, images: Any) -> list[float]:
        self.calls += 1
        random.random()
        if self.calls == self.at:
            raise RuntimeError("the judge is away")
        return brightness(prompts, images)


@pytest.mark.parametrize(
    ("policy", "group_size"),
    [
        pytest.param({"train": "dit"}, 3, marks=pytest.mark.slow),  # As one of two modules, jointly: below.
        pytest.param({"train": "all"}, 3, marks=pytest.mark.slow),
        ({"train": "all", "stages": "joint"}, 2),
    ],
)
def test_a_run_resumes_after_an_error_of_a_reward_in_the_last_rollout_of_a_step(
    pipeline_folder: Path, tmp_path: Path, policy: dict[str, Any], group_size: int
) -> None:
    def run_in(name: str, reward: Failing, resume: str = "never") -> TrainingRun:
        folder = tmp_path / name
        tracking = {"checkpoint_every": 1, "checkpoints": str(folder / "checkpoints")}
        config = parameters(folder, **changes, tracking=tracking, resume=resume)
        return make_run(config, pipeline_folder, reward=reward)

    changes: dict[str, Any] = {
        "policy": {"signal_check": {"rollouts": 0}} | policy,
        "sampling": {
            "rollout": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "steps": 3, "guidance_scale": 1.5},
            "eval": {"steps": 2, "guidance_scale": 1.5},
        },
        "grpo": {"steps": 2, "group_size": group_size},
        "modules": {"dit": {"group_size": 3, "learning_rate": 2e-3, "kl_weight": 0.02}},
        "evaluation": {"every": 2, "prompts": 2, "images_per_prompt": 1},
    }
    whole = run_in("whole", counted := Failing(at=0))
    execute(whole, tmp_path / "out" / "whole")
    folders = {path.name for path in (tmp_path / "out" / "whole").iterdir()}
    assert folders == {"best", "last", "training.csv", "training.json", *whole.trainer.modules}
    rollouts = 1 if policy["train"] == "dit" or "stages" in policy else 2
    assert counted.calls == 2 * rollouts + 1, "and one evaluation"

    failed = run_in("failed", Failing(at=2 * rollouts))
    with pytest.raises(UserError, match="the judge is away"):
        execute(failed, tmp_path / "unused")
    assert [path.name for path in failed.checkpoints.folder.glob("step-*")] == ["step-000001"]
    resumed = run_in("failed", Failing(at=0), "auto")
    random.seed(99)
    execute(resumed, tmp_path / "out" / "resumed")
    assert contents(tmp_path / "out" / "resumed") == contents(tmp_path / "out" / "whole")
    assert rows(resumed) == rows(whole)


def test_a_checkpoint_that_is_there_is_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = token_run(tmp_path, TokenModel(), CountingScorer())
    last, flush = run.checkpoints.folder / "step-000002", os.fsync

    def interrupted(descriptor: int) -> None:
        if last.exists():
            raise KeyboardInterrupt
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        execute(run, tmp_path / "out")
    assert run.checkpoints.newest == last
