"""When a training that gains nothing ends, and that one which gains does not."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.toys import CountingScorer
from tests.training.few_steps import RECORDS, STEPS, parameters
from tests.training.test_run import execute
from tests.training.test_run_toys import TokenModel, token_run
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import Scores
from visual_grpo.training.early_stopping import Gains
from visual_grpo.training.run import Callbacks, TrainingRun

PROMPTS, NOISE, PATIENCE = 32, 0.3, 4
UNITS = [str(prompt) for prompt in range(PROMPTS)]


def looks_until_the_end(seed: int, gain: float, looks: int) -> int | None:
    """Evaluations until the training ends, whose expected total rises by ``gain`` from each to the next."""
    generator = np.random.default_rng(seed)
    level = generator.normal(0, 1, PROMPTS)  # Prompts differ by more than evaluations do.
    gains = Gains()
    for look in range(looks):
        totals = level + gain * look + generator.normal(0, NOISE, PROMPTS)
        gains.look(look + 1, totals.tolist(), UNITS, PATIENCE)
        if gains.without == PATIENCE:
            return look
    return None


def test_of_200_trainings_without_a_gain_nine_of_ten_end_within_the_patience() -> None:
    ended = [looks_until_the_end(seed, 0.0, PATIENCE + 1) for seed in range(200)]
    assert sum(look == PATIENCE for look in ended) >= 180


def test_of_200_trainings_that_gain_one_of_twenty_is_ended_at_most() -> None:
    """Within the patience, the gain is five times the standard deviation of a mean difference."""
    gain = 5 * NOISE * (2 / PROMPTS) ** 0.5 / PATIENCE
    ended = [looks_until_the_end(1000 + seed, gain, 20) for seed in range(200)]
    assert sum(look is not None for look in ended) <= 10


def test_an_evaluation_that_could_score_too_little_is_neither_reference_nor_without_a_gain() -> None:
    """No gain could be proven, and the training would end while it gains."""
    gains, units = Gains(), ["a", "a", "b", "c"]
    for step, totals in enumerate(([1.0, 1.1, math.nan, math.nan], [5.0, 5.2, 5.0, 5.0]), 1):
        gains.look(step, totals, units, PATIENCE)
        assert (gains.step, gains.without) == (step, 0)
    gains.look(3, [math.nan] * 4, units, PATIENCE)
    assert (gains.step, gains.without) == (2, 0), "nothing could be compared"


class Rising(CountingScorer):
    """Evaluations (of three samples) rise until the second, and then no more."""

    def __init__(self, evaluations: int = 0) -> None:
        super().__init__()
        self.evaluations = evaluations

    def __call__(self, prompts: Any, samples: Any) -> Scores:
        scores = super().__call__(prompts, samples)
        if len(samples) != 3:
            return scores
        self.evaluations += 1
        total = torch.arange(3) * 1e-3 * self.evaluations + min(self.evaluations, 2)
        return replace(scores, total=total, rewards={"count": total})


def stopping_run(
    tmp_path: Path, patience: int, resume: str = "never", evaluations: int = 0, every: int = 1
) -> TrainingRun:
    evaluation = {"every": every, "prompts": 3, "adapter": "last"}
    train = {"early_stopping_patience": patience}
    grpo = {"steps": STEPS, "schedule": "constant"}
    scorer = Rising(evaluations)
    return token_run(tmp_path, TokenModel(), scorer, train=train, evaluation=evaluation, grpo=grpo, resume=resume)


@pytest.mark.parametrize("interrupted_after", [None, 3])
def test_the_evaluations_since_the_last_gain_are_counted_also_by_a_resumed_run(
    tmp_path: Path, interrupted_after: int | None
) -> None:
    run = stopping_run(tmp_path, 2)

    def on_step(metrics: Any, row: dict[str, float]) -> None:
        if metrics.step == interrupted_after:
            os.kill(os.getpid(), signal.SIGINT)

    notes: list[str] = []
    run.run(Callbacks(on_step=on_step, note=notes.append))
    if interrupted_after is not None:
        assert run.trainer.step == interrupted_after
        run = stopping_run(tmp_path, 2, "auto", evaluations=interrupted_after)
        notes += execute(run, tmp_path / "out")
    said = run.write_adapters(tmp_path / "facts")["stopped_early"]
    assert said.startswith(
        "2 evaluations on the eval prompts since step 2 proved no gain (the last differs by +0.002 ["
    )
    assert run.trainer.step == 4
    assert f"Early stopping after step 4 of {STEPS}: {said}." in notes


def test_a_training_that_has_stopped_early_goes_on_with_more_patience_alone(tmp_path: Path) -> None:
    execute(stopping_run(tmp_path, 2), tmp_path / "out")
    again = stopping_run(tmp_path, 2, "auto", evaluations=4)
    notes = execute(again, tmp_path / "again")
    assert again.trainer.step == 4
    assert any(note.startswith("The training ended after step 4: 2 evaluations") for note in notes)
    patient = stopping_run(tmp_path, STEPS, "auto", evaluations=4)
    execute(patient, tmp_path / "patient")
    assert patient.trainer.step == STEPS


def test_a_patience_that_has_nothing_to_compare_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"counts evaluations, and evaluation.every is 0"):
        parameters(tmp_path, train={"early_stopping_patience": 2}, evaluation={"every": 0})
    run = stopping_run(tmp_path, 2)
    run.eval_prompts = RECORDS[:1]
    with pytest.raises(UserError, match=r"needs at least 2.*there are 1\."):
        execute(run, tmp_path / "out")


@pytest.mark.parametrize(
    ("patience", "every", "idle"),
    [(3, 2, True), (2, 2, True), (1, 2, False), (5, 1, True), (4, 1, False), (1, 3, True), (1, 4, True)],
)
def test_a_patience_that_cannot_end_the_training_before_its_last_step_is_told(
    tmp_path: Path, patience: int, every: int, idle: bool
) -> None:
    run = stopping_run(tmp_path, patience, evaluations=2, every=every)
    notes = execute(run, tmp_path / "out")
    assert sum("cannot end the training" in note for note in notes) == idle
    assert (run.trainer.step == STEPS) == (run.stopped_early is None) == idle
