"""The average of the adapters: its formula, where it is used, and that a resumed run goes on with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.toys import CountingScorer
from tests.training.test_run import execute, interrupt_at, rows
from tests.training.test_run_toys import TokenModel, Watched, saved, token_run
from visual_grpo.grpo.checkpoint import load_checkpoint
from visual_grpo.training.run import TrainingRun

DECAY = 0.6


def test_the_average_of_all_updates_is_evaluated_and_saved_and_the_weights_are_trained_on(tmp_path: Path) -> None:
    model = Watched()
    grpo = {"steps": 12, "prompts_per_step": 2, "group_size": 3, "updates_per_rollout": 2, "learning_rate": 0.1}
    evaluation = {"every": 4, "prompts": 2, "images_per_prompt": 1}
    run = token_run(tmp_path, model, CountingScorer(), grpo=grpo, evaluation=evaluation, train={"ema_decay": DECAY})
    weights: list[Tensor] = []
    run.trainer.modules["vl"].optimizer.adamw.register_step_post_hook(
        lambda *_: weights.append(model.table.detach().double().clone())
    )
    execute(run, tmp_path / "out")
    averages, average = list[Tensor](), weights[0]
    for n, weight in enumerate(weights, 1):
        decay = 0.0 if n == 1 else min(DECAY, n / (n + 9))
        average = decay * average + (1 - decay) * weight
        averages.append(average)
    assert len(averages) == 24
    assert {min(DECAY, n / (n + 9)) for n in range(2, 25)} > {DECAY, 2 / 11}
    last = saved(tmp_path / "out" / "last")
    for got, want in [*zip(model.weights[:3], averages[7::8], strict=True), (last, averages[-1])]:
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    best = saved(tmp_path / "out" / "best")
    assert any(torch.equal(best, drawn) for drawn in model.weights[:3])
    assert torch.equal(model.table.detach().double(), weights[-1])
    assert not torch.allclose(last.double(), weights[-1], atol=1e-3)


def test_a_resumed_run_goes_on_with_its_average_bit_for_bit(tmp_path: Path) -> None:
    def run(folder: str, **changes: Any) -> TrainingRun:
        return token_run(tmp_path / folder, TokenModel(), CountingScorer(), train={"ema_decay": DECAY}, **changes)

    def checkpointed(run: TrainingRun) -> dict[str, Tensor]:
        assert run.checkpoints.newest is not None
        return load_checkpoint(run.checkpoints.newest)[0]

    whole = run("whole")
    execute(whole, tmp_path / "whole" / "out")
    execute(run("parts"), tmp_path / "unused", interrupt_at(3))
    last = run("parts", resume="auto")
    assert last.checkpoints.completed_steps() == 3
    execute(last, tmp_path / "parts" / "out")
    assert rows(last) == rows(whole)
    got, want = checkpointed(last), checkpointed(whole)
    assert got.keys() == want.keys() > {"ema/vl/0", "ema/vl/updates"}
    assert all(torch.equal(value, want[name]) for name, value in got.items())
