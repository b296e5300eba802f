"""Refuses prompts with which a training cannot do what its parameters ask for."""

from __future__ import annotations

from collections.abc import Sequence

from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import Parameters
from visual_grpo.models.run_spec import RunSpec
from visual_grpo.training.likely_mistakes import fewest_of_a_kind


def require_training_records(prompts: Sequence[PromptRecord]) -> None:
    if not len(prompts):
        raise UserError("The dataset has no training records. Add records, and prepare them again.")


def require_evaluations(config: Parameters, evaluated: Sequence[str], compared: Sequence[str]) -> None:
    """Raises UserError where what may end the training has too few eval prompts to ever do so.

    Args:
        evaluated: the unit of each eval prompt, which is equal for records that are held out together.
        compared: those of the prompts that the baseline has, too.
    """
    action = config.alarm.action
    for name, is_on, units, off in (
        ("train.early_stopping_patience", config.train.early_stopping_patience, evaluated, "leave it out"),
        (f"alarm.action={action}", action != "warn", compared, "set it to warn"),
    ):
        if is_on and len(set(units)) < 2:
            raise UserError(
                f"{name} needs at least 2 eval prompts, with different images, to compare evaluations; there"
                f" are {len(set(units))}. Raise data.eval_share, evaluation.prompts or"
                f" evaluation.max_prompts, or {off}."
            )


def require_separate_groups(spec: RunSpec, prompts: Sequence[PromptRecord]) -> None:
    """Raises UserError where a reward that compares samples would take several groups of one prompt for one."""
    fewest, of_kind = fewest_of_a_kind(prompts)
    for grpo in map(spec.config.grpo_of, spec.modules):
        at_once = min(grpo.prompts_per_step, grpo.rollout_prompts or grpo.prompts_per_step)
        if fewest == 1 and at_once > 1:
            raise UserError(
                "A reward compares the samples of a prompt with each other, and would take the"
                f" {at_once} groups that a rollout has of the only training prompt{of_kind} for one. Set"
                f" grpo.{'prompts_per_step' if spec.joint else 'rollout_prompts'}=1, or add prompts."
            )
