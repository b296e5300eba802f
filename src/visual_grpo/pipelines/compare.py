"""Compares two adapters, or one with the base model, on the same prompts and seeds at the eval sampler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kedro.pipeline import Node, Pipeline

from visual_grpo import provenance
from visual_grpo.adapter_folder import modules_of
from visual_grpo.common import console
from visual_grpo.common.errors import UserError
from visual_grpo.config import Parameters
from visual_grpo.config.decides import DEPENDS_ON
from visual_grpo.data.manifest import RecordTable
from visual_grpo.evaluation import report
from visual_grpo.evaluation.samples import distinct_prompts
from visual_grpo.operations.candidates import ComparedModel, find_model, sample_model, shared_scorer, unseen
from visual_grpo.starter.world_defaults import default_parameters

_SHARED = {"lora": "policy", "rewards": "rewards"}
"""Parameter of a module -> the section that sets it for all modules, if it is not ``grpo``."""


def create_pipeline() -> Pipeline:
    return Pipeline(
        [
            Node(
                compare_adapters,
                ["parameters", "records", "path:adapters", "draft"],
                "comparison",
                name="compare_adapters",
            )
        ],
        tags=["apart", "model", "parameters_of.compare.adapter"],
    )


def compare_adapters(parameters: Parameters, records: RecordTable, latest: Path, draft: Path) -> Path:
    """Generates with both models and reports the differences, with the parameters of the second's training."""
    asked = parameters.compare
    first, second = (find_model(named, latest, parameters) for named in (asked.first, asked.second))
    if first.folder is None and second.folder is None:
        raise UserError("compare: first and second are both none, the base model; name an adapter")
    history = report.read_history(second.folder or first.folder or Path())  # The report needs it, hours from now.
    settings = parameters.evaluation
    shared = distinct_prompts(unseen(records, (first, second), "compare"), settings.max_prompts)
    before, after = draft / "first", draft / "second"
    scorer = shared_scorer(parameters, second.facts or first.facts, shared)
    sample_model(parameters, first, second, shared, scorer, before)
    sample_model(parameters, second, first, shared, scorer, after)
    codes = provenance.code(parameters)
    notes = [f"The rewards are taken from the training of {(second if second.facts else first).name}."]
    if first.facts and second.facts:
        notes.append("One training each: this compares two adapters, not two methods. Other seeds give other adapters.")
    notes += [f"{side.name}: {n}" for side in (first, second) for n in provenance.code_notes(side.facts, codes)]
    evaluation = report.evaluate(
        before,
        after,
        settings,
        second.facts or first.facts,
        names=(first.name, second.name),
        notes=notes,
        adapter=f"{second.name} against {first.name}",
        differences=training_differences(first, second),
    )
    report.write_report(draft, evaluation, before, after, history, defaults=default_parameters())
    if evaluation["differences"]:
        rows = [[name, *map(_short, values)] for name, values in evaluation["differences"].items()]
        console.table("What differs between the trainings", ["", "first", "second"], rows)
    return draft


def training_differences(first: ComparedModel, second: ComparedModel) -> dict[str, list[Any]]:
    """Lists what differs between two trainings, with the first's and the second's value.

    Empty where one model is the base model.
    """
    if first.folder is None or second.folder is None:
        return {}
    trained = {*modules_of(first.folder), *modules_of(second.folder)}
    # Of the base model, one digest is enough.
    found = provenance.differences(
        first.facts, second.facts, DEPENDS_ON["train"], but=["model_content", "model.device"]
    )
    changed = {
        provenance.MEANING.get(name, name): [_said(name, value) for value in values]
        for name, values in found.items()
        if not name.startswith("modules.") or name.split(".")[1] in trained
    }
    commits = [side.facts.get("git.commit") for side in (first, second)]
    return changed | ({"commit": commits} if commits[0] != commits[1] else {})


def _said(name: str, value: Any) -> Any:
    """Returns a value; for one that a module leaves out, the section that it is taken from (`config.ModuleConfig`)."""
    section, *path = name.split(".")
    if value is not None or section != "modules" or len(path) < 2:
        return value
    return f"as {_SHARED.get(path[1], 'grpo')}"


def _short(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
