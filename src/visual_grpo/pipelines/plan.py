"""Makes a plan, and refuses one that does not fit its card."""

from __future__ import annotations

from typing import Any

from kedro.pipeline import Node, Pipeline

from visual_grpo.common import console
from visual_grpo.common.errors import UserError
from visual_grpo.common.quiet_libraries import hidden_progress_bars
from visual_grpo.config import Parameters
from visual_grpo.operations.command import Command
from visual_grpo.operations.plan.estimate import answer, make_plan


def create_pipeline() -> Pipeline:
    return Pipeline(
        [
            Node(plan_training, "parameters", "plan", name="plan_training"),
            Node(require_fit, "plan", None, name="require_fit"),
        ],
    )


def plan_training(parameters: Parameters) -> dict[str, Any]:
    with hidden_progress_bars():
        plan = make_plan(parameters)
    if plan["fits"]:
        for line in answer(plan):
            console.note(line)
        check = Command.current().for_pipeline("gpu_check")
        console.note(f"On a machine with the card, compare the plan with it: {check}")
    return plan


def require_fit(plan: dict[str, Any]) -> None:
    """Raises UserError where the card has too little memory, with what to change."""
    if not plan["fits"]:
        raise UserError("\n".join(answer(plan)))
