"""Nodes that make a plan, and refuse one that does not fit its card."""

from __future__ import annotations

from typing import Any

from visual_grpo import console
from visual_grpo.command import Command
from visual_grpo.config import Parameters
from visual_grpo.errors import UserError


def plan_training(parameters: Parameters) -> dict[str, Any]:
    """See `visual_grpo.plan.make.make_plan`."""
    from visual_grpo.plan.make import make_plan
    from visual_grpo.plan.report import show
    from visual_grpo.third_party_output import hidden_progress_bars

    with hidden_progress_bars():
        plan = make_plan(parameters)
    show(plan)
    return plan


def require_fit(plan: dict[str, Any]) -> None:
    """Raises UserError where the card has too little memory, with what to change."""
    if plan["fits"] is None:
        return
    card = plan["card"]
    needs = f"it needs {plan['peak_gb']:.2f} GB, and tensors may take {card['usable'] / 1e9:.2f} GB of {card['name']}."
    if plan["fits"]:
        console.note(
            f"This fits: {needs} The host needs {plan['host_gb']:.1f} GB.\n"
            f"On a machine with the card, hold the plan against it: {Command.now().of_pipeline('gpu_check')}"
        )
        return
    lines = "\n".join(f"  {change}" for change in plan["changes"])
    raise UserError(f"This does not fit: {needs} What would help:\n{lines}")
