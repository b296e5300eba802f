"""Compares two adapters, or one with the base model, on the same prompts and seeds at the eval sampler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from visual_grpo.common import console
from visual_grpo.common.errors import UserError
from visual_grpo.common.files import new_folder
from visual_grpo.common.importing import code_digests
from visual_grpo.config import Parameters, flatten
from visual_grpo.config.adapter_folder import judged_by_other_code, modules_of
from visual_grpo.config.pipelines import BESIDE_FLOW
from visual_grpo.data.manifest import RecordTable
from visual_grpo.evaluation import compare, report
from visual_grpo.evaluation.samples import distinct_prompts
from visual_grpo.evaluation.verdict import summarise
from visual_grpo.operations.candidates import ComparedModel, draw_model, find_model, shared_scorer, unseen
from visual_grpo.starter.parameters import default_parameters

_UNCOMPARED = {"output", "resume", "adapter", "evaluation", "tracking", "starter", *BESIDE_FLOW}
"""Parameters and sections that change nothing in a training."""


def compare_adapters(parameters: Parameters, records: RecordTable) -> Path:
    """Draws both models and reports the differences, with the parameters of the second's training."""
    first, second = (find_model(named, parameters) for named in (parameters.compare.first, parameters.compare.second))
    if first.folder is None and second.folder is None:
        raise UserError("compare: first and second are both none, the base model; name an adapter")
    settings = parameters.evaluation
    shared = distinct_prompts(unseen(records, (first, second), "compare"), settings.max_prompts)
    folder = new_folder(Path(parameters.output) / "08_reporting/comparison")
    before, after = folder / "first", folder / "second"
    scorer = shared_scorer(parameters, second.facts or first.facts, shared)
    scores = {
        folder: draw_model(parameters, side, side.facts or other.facts, shared, scorer, folder)
        for folder, side, other in ((before, first, second), (after, second, first))
    }
    entries = compare.compare(
        scores[before], scores[after], bootstrap_samples=settings.bootstrap_samples, seed=settings.seed
    )
    codes = code_digests({name: reward.function for name, reward in parameters.rewards.items()})
    notes = [f"The rewards are those of the training of {(second if second.facts else first).name}."]
    if first.facts and second.facts:
        notes.append("One training each: this compares two adapters, not two methods. Other seeds give other adapters.")
    notes += [f"{side.name}: {n}" for side in (first, second) for n in judged_by_other_code(side.facts, codes)]
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
    report.write_report(folder, evaluation, before, after, history, defaults=default_parameters())
    if evaluation["differences"]:
        rows = [[name, *map(_short, values)] for name, values in evaluation["differences"].items()]
        console.table("What differs between the trainings", ["", "first", "second"], rows)
    return folder


def differences(first: ComparedModel, second: ComparedModel) -> dict[str, list[Any]]:
    """Lists what differs between two trainings: parameter, ``data``, ``code`` or ``base model`` -> [first's, second's].

    Empty where one model is the base model.
    """
    if first.folder is None or second.folder is None:
        return {}
    trees = [flatten(model.facts["parameters"]) for model in (first, second)]
    before, after = ({name: value for name, value in tree.items() if value != {}} for tree in trees)
    trained = {*modules_of(first.folder), *modules_of(second.folder)}
    changed = {
        name: [before.get(name), after.get(name)]
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name) and _is_compared(name, trained)
    }
    names = {"data": "data", "model_digest": "base model", "git.commit": "code", "git.state": "code's state"}
    return changed | {
        shown: [first.facts.get(key), second.facts.get(key)]
        for key, shown in names.items()
        if first.facts.get(key) != second.facts.get(key)
    }


def _is_compared(name: str, modules: set[str]) -> bool:
    """Leaves out what changes nothing in a training, and the settings of a module that nobody trained."""
    section, _, rest = name.partition(".")
    if section in _UNCOMPARED or name == "model.device":
        return False
    return section != "modules" or rest.partition(".")[0] in modules


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
