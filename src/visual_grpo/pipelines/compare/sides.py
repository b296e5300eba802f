"""What is compared: adapters or the base model, drawn on the same prompts and seeds at the stock sampler."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_grpo.config import Parameters
from visual_grpo.errors import UserError, counted
from visual_grpo.records.seen import FILE as SEEN
from visual_grpo.records.seen import SeenPrompts
from visual_grpo.records.table import RecordTable
from visual_grpo.trained_adapters import HELD_OUT, NONE, modules_of, read_facts

if TYPE_CHECKING:
    from visual_grpo.rewards.combine import RewardSet
    from visual_grpo.types import PromptRecord

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
    from visual_grpo.tracking.adapters import find_adapters

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
    from visual_grpo import console

    there = list(records.split(split))
    found = there
    for side in sides:
        if side.folder is not None and (side.facts["data"] != records.digest or "start" in side.facts):
            found = _not_seen_by(side, side.folder, found, task)
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


def _not_seen_by(side: Side, folder: Path, records: Sequence[PromptRecord], task: str) -> list[PromptRecord]:
    seen = SeenPrompts.read(folder)
    if seen is not None:
        return [record for record in records if record.prompt not in seen]
    file = folder / HELD_OUT
    if not file.is_file():
        raise UserError(
            f"{task}: {side.name} was trained on other data, and its folder does not say on which prompts: it is of an"
            f" older version, without {SEEN}."
        )
    held_out = set(json.loads(file.read_text(encoding="utf-8")))
    return [record for record in records if record.prompt in held_out]


def shared_scorer(parameters: Parameters, facts: dict[str, Any], records: Sequence[PromptRecord]) -> RewardSet:
    """The scorer of every side, with the weights of the modules that were trained in the training of ``facts``."""
    from visual_grpo import components

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
    from visual_grpo import components, console
    from visual_grpo.evaluation import generate

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
