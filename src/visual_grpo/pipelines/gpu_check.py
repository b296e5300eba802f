"""Takes steps of a training on a GPU and compares their time and memory with the plan's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from kedro.pipeline import Node, Pipeline

from visual_grpo.common import console
from visual_grpo.common.device import device_kind, require_fast, resolve_device
from visual_grpo.common.errors import UserError
from visual_grpo.models.run_spec import RunSpec
from visual_grpo.operations.gpu_check import caught, known_card, measure, single_module
from visual_grpo.operations.plan.report import make_plan


def create_pipeline() -> Pipeline:
    return Pipeline(
        [
            Node(check, "params:run_spec", "gpu_check", name="check_gpu"),
            Node(require_complete, "gpu_check", None, name="require_whole_check"),
        ],
        tags=["model"],
    )


def check(spec: RunSpec) -> dict[str, Any]:
    """Measures steps of each trained module and prints them beside the plan; returns both as JSON.

    Raises UserError where the device is no GPU.
    """
    parameters, device_name = spec.config, spec.config.model.device
    if device_kind(device_name) != "cuda" or not torch.cuda.is_available():
        raise UserError(
            f"model.device is {device_name}, which is no GPU of this machine; expected one to check. What a training"
            " needs is planned without any.",
            remedy="plan",
        )
    device = resolve_device(device_name)
    require_fast(parameters.model.dtype, device)
    card = torch.cuda.get_device_properties(device)
    plan_settings = parameters.plan.model_copy(update={"gpu": known_card(device)})
    cases = []
    with console.progress("Steps on the GPU", total=len(spec.modules)) as bar:
        for module in spec.modules:
            case = single_module(parameters.model_copy(update={"plan": plan_settings}), module)
            measured, plan = caught(partial(measure, case)), caught(partial(make_plan, case))
            cases.append({"module": module, **measured, "plan": plan})
            bar.advance(done=module)
    versions = [f"{name} {version(name)}" for name in ("torch", "transformers", "diffusers", "peft")]
    report = {
        "gpu": f"{card.name}, {card.total_memory / 1e9:.1f} GB, CUDA {torch.version.cuda}, {', '.join(versions)}",
        "model": spec.model,
        "cases": cases,
    }
    show(report)
    return report


def require_complete(gpu_check: dict[str, Any]) -> None:
    """Raises UserError where a case ended with an error."""
    failed = [f"{case['module']}: {case['error']}" for case in gpu_check["cases"] if "error" in case]
    if failed:
        raise UserError("\n".join(["These steps could not be taken:", *failed]))


def show(check: Mapping[str, Any]) -> None:
    """Prints the check so that it can be pasted into an issue: each phase beside the plan's, errors, and peaks that
    differ from the plan's by more than a tenth."""
    console.note(f"GPU check of {check['model']} on {check['gpu']}")
    for case in check["cases"]:
        module, plan = case["module"], case["plan"]
        if "error" in case:
            console.note(f"{module}: {case['error']}")
            continue
        columns = ("phase", "seconds", "planned seconds", "peak GB", "planned GB")
        rows = phase_rows(case)
        console.table(f"{module}, {case['samples']} samples", columns, rows)
        console.summary("", case_summary(case))
        peak, planned = rows[-1][-2:]
        if "error" in plan:
            console.note(f"{module}: there is no plan: {plan['error']}")
        elif abs(peak / planned - 1) > 0.1:
            console.note(f"{module}: the peak is {peak:.1f} GB, planned were {planned:.1f} GB")


def phase_rows(case: Mapping[str, Any]) -> list[list[Any]]:
    """Returns rows of phase, measured and planned seconds, measured and planned peak in GB; the whole step last."""
    planned = {row["phase"]: row for row in case["plan"].get("step", ())}
    rows: list[list[Any]] = []
    for name, measured in case["phases"].items():
        expected = planned.get(name, {})
        rows.append([name, measured["seconds"], expected.get("seconds"), measured["peak_gb"], expected.get("peak_gb")])
    total = sum(row["seconds"] for row in planned.values()) if planned else None
    largest = max((row["peak_gb"] for row in planned.values()), default=None)
    return [*rows, ["step", case["step_seconds"], total, case["peak_gb"], largest]]


def case_summary(case: Mapping[str, Any]) -> dict[str, float | str]:
    """Returns weights, speed, and the metrics of the first step."""
    summary = {
        "weights": f"{case['source']}, loaded in {case['loading_seconds']:.0f} s",
        "samples a second": case["samples"] / case["step_seconds"],
    }
    if "tokens" in case["phases"]:
        tokens = case["samples"] * case["metrics"][-1]["tokens_per_sample"]
        summary["tokens a second"] = tokens / case["phases"]["tokens"]["seconds"]
    return summary | case["metrics"][0]
