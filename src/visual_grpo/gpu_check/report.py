"""Prints a check so that it can be pasted into an issue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from visual_grpo import console

_COLUMNS = ("phase", "seconds", "planned seconds", "peak GB", "planned GB")
_NEAR = 0.1


def show(check: Mapping[str, Any]) -> None:
    console.summary(f"GPU check of {check['model']}, {check['samples_a_step']} samples a step", check["machine"])
    for case in check["cases"]:
        if "error" not in case:
            console.table(case["case"], _COLUMNS, rows_of(case))
            console.summary("", facts_of(case))
    for finding in findings(check):
        console.note(finding)


def findings(check: Mapping[str, Any]) -> list[str]:
    """What is wrong or unexpected, in words."""
    found = []
    for case in check["cases"]:
        planned = max((row["peak_gb"] for row in case["plan"].get("step", ())), default=0.0)
        if "error" in case:
            found.append(f"{case['case']}: {case['error']}")
        elif "error" in case["plan"]:
            found.append(f"{case['case']}: there is no plan: {case['plan']['error']}")
        elif abs(case["peak_gb"] / planned - 1) > _NEAR:
            found.append(f"{case['case']}: the peak is {case['peak_gb']:.1f} GB, planned were {planned:.1f} GB")
    return found


def rows_of(case: Mapping[str, Any]) -> list[list[Any]]:
    """Phase, measured and planned seconds, measured and planned peak in GB; the whole step last."""
    planned = {row["phase"]: row for row in case["plan"].get("step", ())}
    rows: list[list[Any]] = []
    for name, measured in case["phases"].items():
        expected = planned.get(name, {})
        if expected or measured["seconds"] >= 0.005:
            seconds, peak = expected.get("seconds"), expected.get("peak_gb")
            rows.append([name, measured["seconds"], seconds, measured["peak_gb"], peak])
    total = sum(row["seconds"] for row in planned.values()) if planned else None
    largest = max((row["peak_gb"] for row in planned.values()), default=None)
    return [*rows, ["step", case["step_seconds"], total, case["peak_gb"], largest]]


def facts_of(case: Mapping[str, Any]) -> dict[str, float | str | None]:
    metrics, tokens = case["metrics"][0], case["phases"].get("tokens", {}).get("seconds")
    count = case["metrics"][-1].get("tokens_per_sample")
    planned = sum(row["host_waits"] for row in case["plan"].get("step", ()))
    facts = {
        "weights": f"{case['source']}, loaded in {case['loading_seconds']:.0f} s",
        "samples a second": case["samples"] / case["step_seconds"],
        "tokens a second": case["samples"] * count / tokens if tokens and count else None,
        "first ratio, largest |log|": metrics.get("ratio/first_max_abs_log"),
        "sampler's gap, mean": metrics.get("sampler_gap/mean"),
        "gradient norm": metrics.get("grad_norm"),
        "host waits": f"{sum(case['host_waits'].values())}, planned {planned}",
        "most waits at": ", ".join(f"{line} ({n})" for line, n in list(case["host_waits"].items())[:5]),
    }
    return {name: value for name, value in facts.items() if value not in (None, "")}
