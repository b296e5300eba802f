"""Compares two adapters, or one with the base model, on the same prompts and seeds at the eval sampler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from visual_grpo.common import console
from visual_grpo.common.errors import UserError
from visual_grpo.common.importing import code_digests
from visual_grpo.config import Parameters
from visual_grpo.config.adapter_folder import judged_by_other_code
from visual_grpo.data.table import RecordTable
from visual_grpo.evaluation import compare, report
from visual_grpo.evaluation.draw import distinct_prompts
from visual_grpo.evaluation.verdict import lines, summarise
from visual_grpo.operations.candidates import differences, draw_model, find_model, shared_scorer, unseen


def compare_adapters(parameters: Parameters, records: RecordTable, comparison_draft: Path) -> Path:
    """Draws both models and reports the differences, with the parameters of the second's training."""
    first, second = (find_model(named, parameters) for named in (parameters.compare.first, parameters.compare.second))
    if first.folder is None and second.folder is None:
        raise UserError("compare: first and second are both none, the base model; name an adapter")
    settings = parameters.evaluation
    shared = distinct_prompts(unseen(records, (first, second), "compare"), settings.max_prompts)
    before, after = comparison_draft / "first", comparison_draft / "second"
    scorer = shared_scorer(parameters, second.facts or first.facts, shared)
    scores = {
        folder: draw_model(parameters, side, side.facts or other.facts, shared, scorer, folder)
        for folder, side, other in ((before, first, second), (after, second, first))
    }
    entries = compare.compare(
        scores[before], scores[after], bootstrap_samples=settings.bootstrap_samples, seed=settings.seed
    )
    codes = code_digests({name: reward.function for name, reward in parameters.rewards.items()})
    notes = [f"{side.name}: {n}" for side in (first, second) for n in judged_by_other_code(side.facts, codes)]
    headline = summarise(entries, names=(first.name, second.name), notes=notes)
    evaluation = {
        "headline": headline,
        "adapter": f"{second.name} against {first.name}",
        "training": second.facts or first.facts,
        "differences": differences(first, second),
        "conditions": scores[after].attrs["facts"],
        "rewards": entries,
        "controls": [],
    }
    history = report.read_history(second.folder or first.folder or Path())
    report.write_report(comparison_draft, evaluation, before, after, history)
    if evaluation["differences"]:
        rows = [[name, *map(_short, values)] for name, values in evaluation["differences"].items()]
        console.table("What differs between the trainings", ["", "first", "second"], rows)
    for line in lines(headline):
        console.note(line)
    return comparison_draft


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
