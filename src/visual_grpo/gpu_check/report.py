"""A check as text that can be pasted into an issue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NEAR = 0.1
"""A measured peak is taken to be the planned one where it differs by at most this share."""


def report_of(check: Mapping[str, Any]) -> str:
    """Markdown."""
    cases = "\n\n".join(_case(case) for case in check["cases"])
    return "\n".join(
        [
            f"# GPU check of {check['model']}",
            "",
            f"{check['prompts']} x {check['group_size']} samples a step; seconds are those of the last one. A plan's"
            " seconds are estimates.",
            "",
            *_lines(check["machine"]),
            "",
            cases,
            "",
        ]
    )


def findings(check: Mapping[str, Any]) -> list[str]:
    """What is wrong or unexpected, in words; empty where all is well."""
    found = []
    for case in check["cases"]:
        name = f"{case['module']}, {case['height']} x {case['width']}"
        if "error" in case:
            found.append(f"{name}: {case['error']}")
            continue
        planned = case["plan"].get("peak_gb_of_step")
        if planned and abs(case["peak_gb"] / planned - 1) > NEAR:
            found.append(f"{name}: the peak is {case['peak_gb']:.1f} GB, planned were {planned:.1f} GB")
        if case["plan"].get("error"):
            found.append(f"{name}: there is no plan: {case['plan']['error']}")
    machine = check["machine"]
    if not any(machine.get("attention", {"": True}).values()):
        found.append("No fused attention kernel runs on this GPU: attention needs memory for every pair of tokens.")
    return found


def rows_of(case: Mapping[str, Any]) -> list[list[Any]]:
    """Phase, measured and planned seconds, measured and planned peak in GB; the whole step last."""
    planned = {row["phase"]: row for row in case["plan"].get("step", [])}
    names = [name for name in case["phases"] if name in planned or case["phases"][name]["seconds"] >= 0.005]
    rows: list[list[Any]] = []
    for name in names:
        measured, expected = case["phases"][name], planned.get(name, {})
        rows.append([name, measured["seconds"], expected.get("seconds"), measured["peak_gb"], expected.get("peak_gb")])
    seconds = [row["seconds"] for row in planned.values()]
    total = sum(seconds) if seconds and None not in seconds else None
    rows.append(["step", case["step_seconds"], total, case["peak_gb"], case["plan"].get("peak_gb_of_step")])
    return rows


COLUMNS = ("phase", "seconds", "planned seconds", "peak GB", "planned GB")


def _case(case: Mapping[str, Any]) -> str:
    title = f"## {case['module']}, {case['height']} x {case['width']}"
    if "error" in case:
        return f"{title}\n\n{case['error']}\n\n```\n{case.get('traceback', '')}```"
    metrics = case["metrics"][0]
    facts = {
        "weights": f"{case['source']}, {case['weights_gb']:.1f} GB, {case['loading_seconds']:.0f} s",
        "samples a second": f"{case['samples'] / case['step_seconds']:.3g}",
        "tokens a second": _rate(case),
        "first ratio, largest |log|": f"{metrics.get('ratio/first_max_abs_log', 0.0):.3g}",
        "sampler's gap, mean and largest": _pair(metrics, "sampler_gap/mean", "sampler_gap/max"),
        "gradient norm": f"{metrics.get('grad_norm', 0.0):.3g}",
        "host waits": f"{sum(case['host_waits'].values())}, planned {_planned_waits(case)}",
    }
    lines = [f"- {name}: {value}" for name, value in facts.items() if value is not None]
    waits = [f"  - {line}: {count}" for line, count in list(case["host_waits"].items())[:5]]
    return "\n".join([title, "", _table(COLUMNS, rows_of(case)), "", *lines, *waits])


def _rate(case: Mapping[str, Any]) -> str | None:
    """Of all samples together."""
    tokens = case["phases"].get("tokens")
    if tokens is None or not case["tokens_per_sample"] or not tokens["seconds"]:
        return None
    return f"{case['samples'] * case['tokens_per_sample'] / tokens['seconds']:.0f}"


def _pair(metrics: Mapping[str, float], first: str, second: str) -> str | None:
    return None if first not in metrics else f"{metrics[first]:.3g}, {metrics[second]:.3g}"


def _planned_waits(case: Mapping[str, Any]) -> str:
    rows = case["plan"].get("step")
    return "unknown" if rows is None else str(sum(row["host_waits"] for row in rows))


def _lines(machine: Mapping[str, Any]) -> list[str]:
    def shown(value: Any) -> str:
        if isinstance(value, Mapping):
            return ", ".join(f"{name} {shown(each)}" for name, each in value.items())
        if isinstance(value, bool):
            return "yes" if value else "no"
        return f"{value:.1f}" if isinstance(value, float) else str(value)

    return [f"- {name.replace('_', ' ')}: {shown(value)}" for name, value in machine.items()]


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    def cell(value: Any) -> str:
        if value is None:
            return ""
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell(value) for value in row) + " |" for row in lines)
