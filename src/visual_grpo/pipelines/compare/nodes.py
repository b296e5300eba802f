"""The node that compares two adapters, or one with the base model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_grpo.config import Parameters
from visual_grpo.errors import UserError
from visual_grpo.pipelines.compare.differences import differences
from visual_grpo.pipelines.compare.sides import Side, draw, find_side, shared_scorer, unseen
from visual_grpo.records.table import RecordTable
from visual_grpo.trained_adapters import HISTORY, judged_by_other_code

if TYPE_CHECKING:
    import pandas as pd


def compare_adapters(parameters: Parameters, records: RecordTable, comparison_draft: Path) -> Path:
    """The folder with both sides' samples and the report; the parameters are those of the second's training."""
    from visual_grpo import console
    from visual_grpo.evaluation import compare, report
    from visual_grpo.evaluation.generate import distinct_prompts
    from visual_grpo.evaluation.headline import headline, lines

    first, second = (find_side(named, parameters) for named in (parameters.compare.first, parameters.compare.second))
    if first.folder is None and second.folder is None:
        raise UserError("compare: first and second are both none, the base model; name an adapter")
    settings = parameters.evaluation
    shared = distinct_prompts(unseen(records, (first, second), "compare"), settings.max_prompts)
    before, after = comparison_draft / "first", comparison_draft / "second"
    scorer = shared_scorer(parameters, second.facts or first.facts, shared)
    draw(parameters, first, first.facts or second.facts, shared, scorer, before)
    draw(parameters, second, second.facts or first.facts, shared, scorer, after)
    entries = compare.compare(
        _scores(before), _scores(after), bootstrap_samples=settings.bootstrap_samples, seed=settings.seed
    )
    evaluation = {
        "headline": headline(entries, names=(first.name, second.name), notes=_notes(parameters, (first, second))),
        "adapter": f"{second.name} against {first.name}",
        "training": second.facts or first.facts,
        "differences": differences(first, second),
        "conditions": _scores(after).attrs["facts"],
        "rewards": entries,
        "controls": [],
    }
    report.write_report(comparison_draft, evaluation, before, after, _history(second if second.folder else first))
    _show_differences(evaluation["differences"])
    for line in lines(evaluation["headline"]):
        console.note(line)
    return comparison_draft


def _notes(parameters: Parameters, sides: Sequence[Side]) -> list[str]:
    """Where a side was trained with other code of the rewards than judges it."""
    from visual_grpo.importing import code_digests

    codes = code_digests({name: reward.function for name, reward in parameters.rewards.items()})
    return [f"{side.name}: {note}" for side in sides for note in judged_by_other_code(side.facts, codes)]


def _scores(folder: Path) -> pd.DataFrame:
    from visual_grpo.evaluation import generate

    return generate.read_scores(folder)


def _history(side: Side) -> pd.DataFrame:
    import pandas as pd

    return pd.read_csv((side.folder or Path()) / HISTORY)


def _show_differences(found: dict[str, list[Any]]) -> None:
    from visual_grpo import console

    if found:
        rows = [[name, *map(_short, values)] for name, values in found.items()]
        console.table("What differs between the trainings", ["", "first", "second"], rows)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
