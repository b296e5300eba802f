"""Judges the trained policy on the baseline's prompts and seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kedro.pipeline import Node, Pipeline

from visual_grpo import provenance
from visual_grpo.adapter_folder import adapter_digest, modules_of, read_facts
from visual_grpo.common import console
from visual_grpo.common.files import from_here, require_no_links
from visual_grpo.config import EvaluationConfig
from visual_grpo.config.decides import DEPENDS_ON
from visual_grpo.data.manifest import RecordTable
from visual_grpo.evaluation import CONFIDENCE, report
from visual_grpo.evaluation.alarm import alarm_notes
from visual_grpo.evaluation.limits import limit_notes
from visual_grpo.evaluation.verdict import change, decimals, extent, lines, result
from visual_grpo.models.run_spec import RunSpec
from visual_grpo.starter.world_defaults import default_parameters
from visual_grpo.tracking.adapter_lookup import find_adapters
from visual_grpo.tracking.model_card import CARD, model_card
from visual_grpo.training import components, made_with
from visual_grpo.training.evaluation_samples import generate_samples


def create_pipeline() -> Pipeline:
    return Pipeline(
        [
            Node(choose_adapters, ["params:adapter", "adapters"], "judged_adapters", name="choose_adapters"),
            Node(
                generate_trained,
                ["params:run_spec", "base_model", "records", "baseline", "judged_adapters", "draft"],
                "trained",
                name="generate_trained",
            ),
            Node(
                compare_with_baseline,
                ["params:evaluation", "baseline", "trained", "judged_adapters"],
                ["evaluation", "result"],
                name="compare_with_baseline",
            ),
            Node(
                write_report,
                ["evaluation", "baseline", "trained", "judged_adapters", "draft"],
                "evaluation_report",
                name="write_report",
            ),
            Node(
                complete_card,
                ["evaluation", "adapters", "judged_adapters", "evaluation_report"],
                None,
                name="complete_card",
            ),
            Node(show, ["evaluation", "evaluation_report"], None, name="show_evaluation"),
        ],
        tags=["tracked", "distributed", "training", "rewards", "parameters_of.adapter"],
    )


def choose_adapters(named: str, adapters: Path) -> Path:
    """Returns the adapters to judge: ``adapters``, or those that the parameter ``adapter`` names."""
    folder = find_adapters(named, adapters)
    require_no_links(folder)  # The report shows pictures of it.
    report.read_history(folder)  # The report needs it, hours from now.
    return folder


def generate_trained(
    spec: RunSpec,
    base_model: dict[str, Any],
    records: RecordTable,
    baseline: Path,
    adapters: Path,
    draft: Path,
) -> Path:
    """Generates the trained policy's samples; refuses a baseline that would not pair."""
    components.check_unchanged(base_model, spec)
    training, before = read_facts(adapters), provenance.read(baseline, "baseline")
    made_from = {"baseline": before["digest"], "adapters": adapter_digest(adapters)}
    now = made_with.of(spec, base_model, records.digest, **made_from)
    provenance.require_pair(before, now, training.get("mlflow_run_id"))
    provenance.require_trained_on(training, now)
    generate_samples(draft, spec, records, adapters=adapters, title="evaluate: samples")
    provenance.write(draft, now)
    return draft


def compare_with_baseline(
    settings: EvaluationConfig, baseline: Path, trained: Path, adapters: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the evaluation (paired differences of every score, headline) and the headline's numbers."""
    training, modules, identity = read_facts(adapters), modules_of(adapters), adapter_digest(adapters)
    now, before = provenance.read(trained, "evaluate"), provenance.read(baseline, "baseline")
    provenance.require_made_from(now, trained, "evaluate", baseline=before["digest"], adapters=identity)
    limits = limit_notes(report.read_history(adapters), training.get("parameters", {}), modules)
    early = training.get("stopped_early")
    stopped = [f"The training stopped early, after step {training['steps']}: {early}."] if early else []
    changed = provenance.code_notes(training, now)
    evaluation = report.evaluate(
        baseline,
        trained,
        settings,
        training,
        notes=[*alarm_notes(training), *stopped, *limits, *changed],
        seed=settings.seed,
        # A result should not depend on where it was made.
        adapter=", ".join(str(from_here(adapters / module)) for module in modules),
        adapter_digest=identity,
        modules=modules,
        depends_on=provenance.values(now, DEPENDS_ON["baseline"], rounding=False),
    )
    return evaluation, result(evaluation["headline"])


def write_report(evaluation: dict[str, Any], baseline: Path, trained: Path, adapters: Path, draft: Path) -> Path:
    history = report.read_history(adapters)
    report.write_report(draft, evaluation, baseline, trained, history, adapters, default_parameters())
    return draft


def complete_card(evaluation: dict[str, Any], adapters: Path, judged: Path, evaluation_report: Path) -> None:
    """Writes the result on the card of this output folder's adapters, which digests and DVC (.dvcignore) leave out.

    Adapters from elsewhere belong to somebody: their folder is only read.
    """
    facts = read_facts(judged)
    if judged == adapters and "parameters" in facts:
        card = model_card(facts, modules_of(judged), lines(evaluation["headline"]))
        (judged / CARD).write_text(card, encoding="utf-8")


def show(evaluation: dict[str, Any], evaluation_report: Path) -> None:
    """Prints a table of the headline's split and sampler, once the report is there; the verdict comes at the end."""
    headline, entries = evaluation["headline"], evaluation["rewards"]
    view, task = (headline["split"], headline["sampler"]), headline["task"] or {}
    rows = [entry for entry in entries if (entry["split"], entry["sampler"]) == view]
    if not rows:
        return
    shown = [entry for entry in rows if "/" not in entry["name"] or entry["name"] == task.get("score")]
    console.table(
        f"{extent(headline)}, {headline['samples']} pairs of samples, {headline['sampler']} sampler (* optimised)",
        ["score", "base", "trained", "difference [95%]", "unscored (base / trained)"],
        [_cells(entry, headline) for entry in shown],
    )
    if any("judge_of" in entry for entry in shown):
        console.note("A judge is a second opinion on what is optimised, and is never optimised itself.")


def _cells(entry: dict[str, Any], headline: dict[str, Any]) -> list[str]:
    task, unscored = headline["task"], [entry["unscored_baseline"], entry["unscored_trained"]]
    mark = "* (a ranking, not in the total)" if "ranking" in entry else "*" * entry["optimised"]
    if "judge_of" in entry:
        level = "" if entry["confidence"] == CONFIDENCE else f", {100 * entry['confidence']:.4g}% interval"
        mark = f" (judge{level})"
    name = task["name"] if task and entry["name"] == task["score"] else entry["name"] + mark
    counts = f"{unscored[0]} / {unscored[1]}" if any(unscored) else ""
    if entry["difference"] is None:
        return [name, "", "", "", counts]
    means = (f"{entry[side]:z.{decimals(entry)}f}" for side in ("baseline", "trained"))
    return [name, *means, change(entry), counts]
