"""Judges the trained policy on the baseline's prompts and seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from visual_grpo.config import EvaluationConfig, Parameters
from visual_grpo.records.table import RecordTable
from visual_grpo.trained_adapters import HISTORY, modules_of, read_facts


def choose_adapters(parameters: Parameters, adapters: Path) -> Path:
    """The folder of the adapters to judge: ``adapters``, or those that the parameter ``adapter`` names."""
    from visual_grpo.tracking.adapters import find_adapters

    return find_adapters(parameters.adapter, adapters)


def draw_trained(
    parameters: Parameters,
    starter_report: dict[str, Any],
    records: RecordTable,
    baseline: Path,
    adapters: Path,
    trained_draft: Path,
) -> Path:
    """The folder with the trained policy's samples; refuses a baseline that would not pair."""
    from visual_grpo import components
    from visual_grpo.evaluation import compare, generate
    from visual_grpo.pipelines.baseline.nodes import draw_samples

    samplers = components.make_plan(parameters, starter_report["model"]).samplers
    facts = generate.conditions(parameters, samplers, model=starter_report["digest"], dataset=records.digest)
    compare.check_facts(generate.read_scores(baseline).attrs["facts"], facts)
    compare.check_adapter(read_facts(adapters), model=starter_report["digest"])
    draw_samples(trained_draft, parameters, starter_report, records, adapters=adapters, title="evaluate")
    return trained_draft


def compare_with_baseline(
    seed: int, settings: EvaluationConfig, baseline: Path, trained: Path, adapters: Path
) -> dict[str, Any]:
    """The evaluation: paired differences of every score, and what they were measured on."""
    from visual_grpo.evaluation import compare, generate

    before, after = generate.read_scores(baseline), generate.read_scores(trained)
    entries = compare.compare(before, after, bootstrap_samples=settings.bootstrap_samples, seed=seed)
    return {
        "seed": seed,
        "adapter": ", ".join(_shown(adapters / module) for module in modules_of(adapters)),
        "training": read_facts(adapters),
        "conditions": after.attrs["facts"],
        "rewards": entries,
    }


def write_report(
    evaluation: dict[str, Any],
    baseline: Path,
    trained: Path,
    adapters: Path,
    evaluation_report_draft: Path,
) -> Path:
    """The folder with the report."""
    import pandas as pd

    from visual_grpo.evaluation import report

    report.write_report(evaluation_report_draft, evaluation, baseline, trained, pd.read_csv(adapters / HISTORY))
    return evaluation_report_draft


def show(evaluation: dict[str, Any], evaluation_report: Path) -> None:
    """Logs the evaluation to MLflow and prints baseline against trained."""
    from visual_grpo import console
    from visual_grpo.evaluation.report import extent
    from visual_grpo.tracking import Tracker

    entries = evaluation["rewards"]
    names = [entry["name"] for entry in entries]
    tracker = Tracker.active()
    tracker.folder(evaluation_report, "evaluation")
    tracker.metrics(_metrics(entries), step=evaluation["training"]["steps"])
    for split in dict.fromkeys(entry["split"] for entry in entries):
        rows = [entry for entry in entries if entry["split"] == split]
        images = max(entry["images"] for entry in rows)
        # What could not be scored leaves a score with fewer.
        prompts = extent(max(rows, key=lambda entry: entry["prompts"]))
        console.table(
            f"{split.replace('_', '-')}: {prompts}, {images} samples per sampler (* optimised)",
            ["reward", "sampler", "baseline", "trained", "difference [95%]", "wins"],
            [_cells(entry) for entry in sorted(rows, key=lambda entry: names.index(entry["name"]))],
        )
    console.summary(
        "",
        {"adapter": evaluation["adapter"], "report": _shown(evaluation_report / "evaluation.html")},
    )


def _shown(path: Path) -> str:
    """Relative to the project where it is inside: a result should not depend on where it was made."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _metrics(entries: list[dict[str, Any]]) -> dict[str, float]:
    return {
        f"evaluation/{entry['split']}/{entry['sampler']}/{entry['name']}/{value}": entry[value]
        for entry in entries
        for value in ("baseline_mean", "trained_mean", "difference", "ci_low", "ci_high", "win_rate")
        if entry[value] is not None
    }


def _cells(entry: dict[str, Any]) -> list[str]:
    reward, _, part = entry["name"].partition("/")
    head = [f"  {part}" if part else reward + "*" * entry["optimised"], entry["sampler"]]
    if entry["difference"] is None:
        return [*head, "", "", "unscored", ""]
    interval = "" if entry["ci_low"] is None else f" [{entry['ci_low']:.3f}, {entry['ci_high']:.3f}]"
    return [
        *head,
        f"{entry['baseline_mean']:.3f}",
        f"{entry['trained_mean']:.3f}",
        f"{entry['difference']:+.3f}{interval}",
        f"{entry['win_rate']:.0%}",
    ]
