"""Steps of a released model with random weights, beside the plan: seconds, memory, share of the card's arithmetic."""

from __future__ import annotations

import gc
from typing import Any
from unittest.mock import patch

import torch
from cases import released
from recording import Machine, Recorder

from visual_grpo.common.errors import UserError
from visual_grpo.config import Parameters, merged
from visual_grpo.models.tokens import generation
from visual_grpo.operations.gpu_measurement import measure
from visual_grpo.operations.plan.dry_run import DryRunner, planned_model
from visual_grpo.operations.plan.estimate import find_card, phase_seconds

CARDS = ("H100", "H200")
LENIENT = {"grpo": {"ratio_tolerance": 1e9, "non_finite": "skip"}}
"""Random weights have flatter distributions than released ones, and may fail a check that is made for those."""


def run(rows: Recorder, machine: Machine, name: str) -> None:
    config = released(name, machine)
    _steps(rows, machine, name, config)
    if name == "qwen_vl_3b":  # Last: what the CUDA graph of the tokens brings.
        with patch.object(generation, "token_steps", generation.TokenSteps):
            _steps(rows, machine, f"{name}, growing cache", config)


def _steps(rows: Recorder, machine: Machine, name: str, config: Parameters) -> None:
    found: dict[str, Any] = {}
    try:
        found = measure(config)
    except UserError as error:
        rows.add("findings", model=name, finding=str(error))
    if not found:  # Without the failed training, which the error held.
        gc.collect()
        torch.cuda.empty_cache()
        found = measure(config.__class__.model_validate(merged(config.model_dump(), LENIENT)))
    plan = plan_of(config) if machine.tiny else machine.plans.get(name.partition(",")[0], {})
    card = "H200" if machine.is_cuda and "H200" in torch.cuda.get_device_name() else "H100"
    best = machine.card.get("product bfloat16, TFLOP/s")
    for phase, measured in found["phases"].items():
        seconds, planned = measured["seconds"], plan.get(phase, {})
        rate, kernels = planned.get("tflop", 0) / seconds, planned.get("kernels")
        rows.add(
            "phases",
            model=name,
            phase=phase,
            seconds=seconds,
            planned=planned.get("seconds", {}).get(card),
            gb=measured["peak_gb"],
            planned_gb=planned.get("peak_gb"),
            mfu_percent=100 * rate / best if rate and best else None,
            us_a_kernel=1e6 * seconds / kernels if kernels else None,
        )
    total = sum(row["seconds"][card] for row in plan.values()) or None
    peak = max((row["peak_gb"] for row in plan.values()), default=None)
    whole = {"seconds": found["step_seconds"], "planned": total, "gb": found["peak_gb"], "planned_gb": peak}
    rows.add("phases", model=name, phase=f"step of {found['samples']} samples", **whole)
    rows.add("loading", model=name, seconds=found["loading_seconds"], weights=found["source"].partition(",")[0])
    for number, metrics in enumerate(found["metrics"]):
        for metric, value in metrics.items():
            rows.add("metrics", model=name, step=number + 1, metric=metric, value=value)


def plan_of(config: Parameters) -> dict[str, Any]:
    """Counts a step without weights or a GPU; phase -> what is planned of it, its seconds by the card's name."""
    runner = DryRunner(planned_model(config))
    return {
        name: {
            "peak_gb": phase.peak / 1e9,
            "tflop": phase.flops / 1e12,
            "kernels": round(phase.kernels),
            "seconds": {card: phase_seconds(phase, find_card(card), config.model.dtype) for card in CARDS},
        }
        for name, phase in runner.step().phases.items()
        if phase.kernels
    }
