"""Compares two adapters, or one with the base model, on the same prompts and seeds at the eval sampler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from visual_grpo.common import console
from visual_grpo.common.errors import UserError
from visual_grpo.common.importing import code_digests
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import Parameters, flatten
from visual_grpo.config.adapter_folder import judged_by_other_code, modules_of
from visual_grpo.data.table import RecordTable, SeenPrompts
from visual_grpo.evaluation import compare, report
from visual_grpo.evaluation.draw import distinct_prompts, draw_and_score, requests
from visual_grpo.evaluation.verdict import headline, lines
from visual_grpo.operations.candidates import Side, find_side
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.training import components


def compare_adapters(parameters: Parameters, records: RecordTable, comparison_draft: Path) -> Path:
    """The folder with both sides' samples and the report; the parameters are those of the second's training."""
    first, second = (find_side(named, parameters) for named in (parameters.compare.first, parameters.compare.second))
    if first.folder is None and second.folder is None:
        raise UserError("compare: first and second are both none, the base model; name an adapter")
    settings = parameters.evaluation
    shared = distinct_prompts(unseen(records, (first, second), "compare"), settings.max_prompts)
    before, after = comparison_draft / "first", comparison_draft / "second"
    scorer = shared_scorer(parameters, second.facts or first.facts, shared)
    scores = {
        folder: draw(parameters, side, side.facts or other.facts, shared, scorer, folder)
        for folder, side, other in ((before, first, second), (after, second, first))
    }
    entries = compare.compare(
        scores[before], scores[after], bootstrap_samples=settings.bootstrap_samples, seed=settings.seed
    )
    codes = code_digests({name: reward.function for name, reward in parameters.rewards.items()})
    notes = [f"{side.name}: {n}" for side in (first, second) for n in judged_by_other_code(side.facts, codes)]
    found = headline(entries, names=(first.name, second.name), notes=notes)
    evaluation = {
        "headline": found,
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
    for line in lines(found):
        console.note(line)
    return comparison_draft


_UNCOMPARED = (
    *("output", "resume", "adapter", "run", "model.device"),
    *("evaluation.", "tracking.", "generate.", "score.", "compare.", "promotion.", "reproduce.", "starter."),
)
"""Beginnings of the names of parameters that change nothing in a training."""


def unseen(records: RecordTable, sides: Sequence[Side], task: str, split: str = "held_out") -> list[PromptRecord]:
    """The records of ``split`` whose prompts no side has seen in its training.

    Args:
        task: the pipeline, for the messages.
    """
    there = list(records.split(split))
    found = there
    for side in sides:
        if side.folder is not None and (side.facts["data"] != records.digest or "start" in side.facts):
            seen = SeenPrompts.read(side.folder)
            found = [record for record in found if record.prompt not in seen]
    what = split.replace("_", "-")
    if not found:
        raise UserError(
            f"{task}: each of the {len(there)} {what} prompts of these data was seen by one of the trainings, so there"
            " is nothing to compare that neither has seen. Compare where one of them was trained: the same --env and"
            " data.path."
        )
    if len(found) < len(there):
        console.note(f"Other data: compared on the {len(found)} of {len(there)} {what} prompts that neither has seen.")
    return found


def shared_scorer(parameters: Parameters, facts: dict[str, Any], records: Sequence[PromptRecord]) -> RewardSet:
    """The scorer of every side, with the weights of the modules that were trained in the training of ``facts``."""
    spec = components.make_run_spec(_of_side(parameters, facts), facts["model"])
    scorer = components.build_scorer(parameters, spec.modules)
    scorer.check_machine()
    scorer.check_records(records)
    return scorer


def draw(
    parameters: Parameters,
    side: Side,
    facts: dict[str, Any],
    records: Sequence[PromptRecord],
    scorer: RewardSet,
    folder: Path,
    *,
    split: str = "held_out",
) -> pd.DataFrame:
    """The side's samples and scores on the records, each of a distinct prompt.

    ``facts`` name the base model and the trained modules.
    """
    config = _of_side(parameters, facts)
    settings, sampler = parameters.evaluation, parameters.sampling.eval
    asked = requests(records, settings.images_per_prompt, settings.seed, split)
    model = components.build_model(config, facts["model"], side.folder)
    with console.progress(folder.name.replace("_", " "), len(asked)) as bar:
        return draw_and_score(
            model,
            scorer,
            asked,
            {compare.EVAL_SAMPLER: sampler},
            folder,
            batch_size=settings.batch_size,
            facts={"model": facts["model_digest"], "sampler": sampler.model_dump(mode="json")},
            advance=bar.advance,
        )


def differences(first: Side, second: Side) -> dict[str, list[Any]]:
    """Lists what differs between two trainings: parameter, ``data``, ``code`` or ``base model`` -> [first's, second's].

    Empty where one side is the base model.
    """
    if first.folder is None or second.folder is None:
        return {}
    trees = [flatten(side.facts["parameters"]) for side in (first, second)]
    before, after = ({name: value for name, value in tree.items() if value != {}} for tree in trees)
    trained = {*modules_of(first.folder), *modules_of(second.folder)}
    found = {
        name: [before.get(name), after.get(name)]
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name) and not name.startswith(_UNCOMPARED) and _is_of(name, trained)
    }
    names = {"data": "data", "model_digest": "base model", "git.commit": "code", "git.state": "code's state"}
    return found | {
        shown: [first.facts.get(key), second.facts.get(key)]
        for key, shown in names.items()
        if first.facts.get(key) != second.facts.get(key)
    }


def _is_of(name: str, modules: set[str]) -> bool:
    """Leaves out the settings of a module that nobody trained."""
    section, _, rest = name.partition(".")
    return section != "modules" or rest.partition(".")[0] in modules


def _of_side(parameters: Parameters, facts: dict[str, Any]) -> Parameters:
    """One sampler, size and set of rewards for both; the modules and their LoRA are each side's own."""
    own = Parameters.model_validate(facts["parameters"]) if "parameters" in facts else parameters
    trained = {"train": own.policy.train, "stages": own.policy.stages, "lora": own.policy.lora}
    return parameters.model_copy(
        update={
            "policy": parameters.policy.model_copy(update=trained),
            "model": own.model.model_copy(update={"device": parameters.model.device}),
        }
    )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
