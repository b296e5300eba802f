"""Hours of a whole run: its steps, the evaluations while it trains, the baseline before and the evaluation after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from visual_grpo.config import Parameters
from visual_grpo.policies.family_settings import Plan


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """Seconds, estimated."""

    step: float
    signal_check: float
    steps: float
    evaluation_in_training: float
    """Of one of them."""
    evaluations_in_training: int
    baseline: float
    evaluate: float

    @property
    def total(self) -> float:
        in_training = self.evaluation_in_training * self.evaluations_in_training
        return self.signal_check + self.steps + in_training + self.baseline + self.evaluate


def run_time(config: Parameters, plan: Plan, step: float, batch: Mapping[str, float], cards: int) -> RunTime:
    """
    Args:
        step: seconds of a step.
        batch: seconds of one batch of the evaluation, by sampler.
        cards: that share the batches of an evaluation.
    """
    evaluation, steps = config.evaluation, config.grpo.steps
    # Of both splits, as many prompts as are drawn at most; how many records there are is not known yet.
    prompts = evaluation.max_prompts or evaluation.prompts
    images = prompts * evaluation.images_per_prompt
    judged = sum(_batches(2 * images, evaluation.batch_size, cards) * seconds for seconds in batch.values())
    controls = len(plan.controls) * _batches(images, evaluation.batch_size, cards) * batch["stock"]
    every = evaluation.every
    return RunTime(
        step=step,
        signal_check=step * config.policy.signal_check.rollouts,
        steps=step * steps,
        evaluation_in_training=_batches(evaluation.prompts, evaluation.batch_size, cards) * batch["stock"],
        evaluations_in_training=1 if not every else -(-steps // every),
        baseline=judged + controls,
        evaluate=judged,
    )


def _batches(images: int, size: int, cards: int) -> int:
    """That each card has to draw."""
    batches = -(-images // size)
    return -(-batches // cards)
