"""Hours of a whole run: its steps, the evaluations while it trains, the baseline before and the evaluation after."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


def run_time(
    config: Parameters,
    plan: Plan,
    step: float,
    batch: Mapping[str, float],
    cards: int,
    share: Callable[[int], float] = lambda images: 1.0,
) -> RunTime:
    """
    Args:
        step: seconds of a step.
        batch: seconds of one batch of ``evaluation.batch_size`` images, by sampler.
        cards: that share the images of a batch that is as many times as large.
        share: of that time, what a batch of fewer images takes.
    """
    evaluation, steps = config.evaluation, config.grpo.steps

    def batches(images: int) -> float:
        whole, rest = divmod(images, evaluation.batch_size * cards)
        return whole + (share(-(-rest // cards)) if rest else 0.0)

    # Of both splits, as many prompts as are drawn at most; how many records there are is not known yet.
    prompts = evaluation.max_prompts or evaluation.prompts
    images = prompts * evaluation.images_per_prompt
    judged = sum(batches(2 * images) * seconds for seconds in batch.values())
    controls = len(plan.controls) * batches(images) * batch["stock"]
    every = evaluation.every
    return RunTime(
        step=step,
        signal_check=step * config.policy.signal_check.most(config.grpo.steps),
        steps=step * steps,
        evaluation_in_training=batches(evaluation.prompts) * batch["stock"],
        evaluations_in_training=1 if not every else -(-steps // every),
        baseline=judged + controls,
        evaluate=judged,
    )
