"""Compares two adapters, or one with the base model, on the same prompts and seeds at the stock sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from visual_grpo import components, console
from visual_grpo.config import Parameters, flatten
from visual_grpo.config.presets import pinned
from visual_grpo.errors import UserError, counted
from visual_grpo.evaluation import compare, generate, report
from visual_grpo.evaluation.generate import distinct_prompts
from visual_grpo.evaluation.headline import headline, lines
from visual_grpo.importing import code_digests
from visual_grpo.records.seen import SeenPrompts
from visual_grpo.records.table import RecordTable
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.tracking.model_ref import find_adapters
from visual_grpo.trained_adapters import NONE, judged_by_other_code, modules_of, read_facts, read_history
from visual_grpo.types import PromptRecord


def compare_adapters(parameters: Parameters, records: RecordTable, comparison_draft: Path) -> Path:
    """The folder with both sides' samples and the report; the parameters are those of the second's training."""
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
    codes = code_digests({name: reward.function for name, reward in parameters.rewards.items()})
    return [f"{side.name}: {note}" for side in sides for note in judged_by_other_code(side.facts, codes)]


def _scores(folder: Path) -> pd.DataFrame:
    return generate.read_scores(folder)


def _history(side: Side) -> pd.DataFrame:
    return read_history(side.folder or Path())


def _show_differences(found: dict[str, list[Any]]) -> None:
    if found:
        rows = [[name, *map(_short, values)] for name, values in found.items()]
        console.table("What differs between the trainings", ["", "first", "second"], rows)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


SAMPLER = "stock"


@dataclass(frozen=True)
class Side:
    """A training's adapters, or the base model."""

    name: str
    folder: Path | None
    facts: dict[str, Any]
    """Of the training; empty for the base model."""


BASE = Side("the base model", None, {})


def find_side(named: str, parameters: Parameters) -> Side:
    """The adapters that a parameter names, or the base model."""
    if named == NONE:
        return BASE
    return side_of(named, find_adapters(named, Path(parameters.adapters_folder)))


def side_of(name: str, folder: Path) -> Side:
    """The adapters in ``folder``."""
    facts = read_facts(folder)
    trained = f"{'+'.join(modules_of(folder))}, {counted(facts['steps'], 'step')}, seed {facts['seed']}"
    return Side(f"{name} ({trained})", folder, facts)


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
    plan = components.make_plan(_of_side(parameters, facts), facts["model"])
    scorer = components.build_scorer(parameters, plan.modules)
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
) -> None:
    """The side's samples and scores on the records, each of a distinct prompt.

    ``facts`` name the base model and the trained modules.
    """
    config = _of_side(parameters, facts)
    settings = parameters.evaluation
    requests = generate.plan_images(
        {split: records},
        seed=settings.seed,
        images_per_prompt=settings.images_per_prompt,
        max_prompts=None,
    )
    samplers = {SAMPLER: parameters.sampling.stock}
    model = components.build_model(config, facts["model"], side.folder)
    with console.progress(folder.name.replace("_", " "), len(requests)) as bar:
        generate.draw_and_score(
            model,
            scorer,
            requests,
            samplers,
            folder,
            batch_size=settings.batch_size,
            facts={"model": facts["model_digest"], "sampler": parameters.sampling.stock.model_dump(mode="json")},
            advance=bar.advance,
        )


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


_UNCOMPARED = (
    "output",
    "resume",
    "adapter",
    "evaluation.",
    "tracking.",
    "generate.",
    "score.",
    "compare.",
    "promotion.",
    "run",
    "reproduce.",
    "model.device",
    "starter.",
)


def differences(first: Side, second: Side) -> dict[str, list[Any]]:
    """What differs between two trainings: parameter, ``data``, ``code`` or ``base model`` -> [first's, second's].

    A parameter that a module can have differently is what it was in the training of the modules, such as
    ``grpo.learning_rate: [0.0007, "0.0007 (ar), 0.0006 (dit)"]``. Empty where one side is the base model.
    """
    if not first.facts or not second.facts:
        return {}
    settings = [_settings(side) for side in (first, second)]
    found = {
        name: [side.get(name) for side in settings]
        for name in sorted(settings[0].keys() | settings[1].keys())
        if not name.startswith(_UNCOMPARED) and settings[0].get(name) != settings[1].get(name)
    }
    names = {"data": "data", "model_digest": "base model", "git.commit": "code", "git.state": "code's state"}
    return found | {
        shown: [first.facts.get(key), second.facts.get(key)]
        for key, shown in names.items()
        if first.facts.get(key) != second.facts.get(key)
    }


def _settings(side: Side) -> dict[str, Any]:
    """The parameters of a training by their dotted names, as its modules had them."""
    tree = side.facts.get("parameters")
    if tree is None or side.folder is None:
        return {}
    config = Parameters.model_validate(pinned(tree))
    of_modules = {module: flatten(_of_module(config, module)) for module in modules_of(side.folder)}
    names = [name for settings in of_modules.values() for name in settings]
    shared = {name: value for name, value in flatten(tree).items() if not name.startswith("modules.")}
    return shared | {name: _together({m: settings[name] for m, settings in of_modules.items()}) for name in names}


def _of_module(config: Parameters, module: str) -> dict[str, Any]:
    """What `Parameters.modules` can have differently."""
    return {
        "grpo": config.grpo_of(module).model_dump(mode="json"),
        "policy": {"lora": config.lora_of(module).model_dump(mode="json")},
        "rewards": {name: {"weight": weight} for name, weight in config.weights([module]).items()},
    }


def _together(values: dict[str, Any]) -> Any:
    """One value for all modules, or each module's."""
    [first, *others] = values.values()
    if all(other == first for other in others):
        return first
    return ", ".join(
        f"{value:g} ({module})" if isinstance(value, float) else f"{value} ({module})"
        for module, value in values.items()
    )
