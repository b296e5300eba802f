"""Takes steps of a training on a GPU and compares their time and memory with the plan's."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from kedro.pipeline import Node, Pipeline

from visual_grpo.common import console
from visual_grpo.common.device import device_kind, require_fast, resolve_device
from visual_grpo.common.errors import UserError
from visual_grpo.common.quiet_libraries import hidden_progress_bars
from visual_grpo.config import Parameters
from visual_grpo.models.run_spec import resolve
from visual_grpo.operations.gpu_measurement import known_card, measure, single_module
from visual_grpo.operations.plan.estimate import make_plan


def create_pipeline() -> Pipeline:
    # Without the tag `model`: a machine without the weights, or without a network, is measured with random ones.
    return Pipeline([Node(check, "parameters", "gpu_check", name="check_gpu")])


def check(parameters: Parameters) -> dict[str, Any]:
    """Measures steps of each trained module and prints them next to the plan; returns both as JSON.

    Raises UserError where the device is not a GPU.
    """
    spec, device_name = resolve(parameters), parameters.model.device
    if device_kind(device_name) != "cuda" or not torch.cuda.is_available():
        raise UserError(
            f"model.device is {device_name}, which is not a GPU of this machine. gpu_check needs one; the pipeline"
            " plan needs none.",
            remedy="plan",
        )
    device = resolve_device(device_name)
    require_fast(parameters.model.dtype, device)
    card = torch.cuda.get_device_properties(device)
    versions = [f"{name} {version(name)}" for name in ("torch", "transformers", "diffusers", "peft")]
    gpu = f"{card.name}, {card.total_memory / 1e9:.1f} GB, CUDA {torch.version.cuda}, {', '.join(versions)}"
    console.note(f"GPU check of {parameters.model.path} on {gpu}")
    plan_settings = parameters.plan.model_copy(update={"gpu": known_card(device)})
    cases = []
    for module in spec.modules:
        config = single_module(parameters.model_copy(update={"plan": plan_settings}), module)
        with hidden_progress_bars():
            measured = measure(config)
            gc.collect()
            torch.cuda.empty_cache()
            cases.append({"module": module, **measured, "plan": make_plan(config)})
        show(cases[-1])
    return {"gpu": gpu, "model": parameters.model.path, "cases": cases}


def show(case: Mapping[str, Any]) -> None:
    """Prints each phase next to the plan's, and says where the peak differs by more than a tenth."""
    rows, module = phase_rows(case), case["module"]
    columns = ("phase", "seconds", "planned seconds", "peak GB", "planned GB")
    console.table(f"{module}, {case['samples']} samples", columns, rows)
    weights = f"{case['source']}, loaded in {case['loading_seconds']:.0f} s"
    speed = {"weights": weights, "samples a second": case["samples"] / case["step_seconds"]}
    console.summary("", speed | case["metrics"][0])
    peak, planned = rows[-1][-2:]
    if abs(peak / planned - 1) > 0.1:
        console.note(f"{module}: the peak is {peak:.1f} GB, the plan expected {planned:.1f} GB")


def phase_rows(case: Mapping[str, Any]) -> list[list[Any]]:
    """Returns rows of phase, measured and planned seconds, measured and planned peak in GB; the whole step last."""
    planned = {row["phase"]: row for row in case["plan"]["step"]}
    rows: list[list[Any]] = []
    for name, measured in case["phases"].items():
        expected = planned.get(name, {})
        rows.append([name, measured["seconds"], expected.get("seconds"), measured["peak_gb"], expected.get("peak_gb")])
    total = sum(row["seconds"] for row in planned.values())
    largest = max(row["peak_gb"] for row in planned.values())
    return [*rows, ["step", case["step_seconds"], total, case["peak_gb"], largest]]
