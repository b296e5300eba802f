"""The node that compares two adapters, or one with the base model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_grpo.config import Parameters
from visual_grpo.errors import UserError, counted
from visual_grpo.pipelines.compare.differences import Side, differences
from visual_grpo.records.table import RecordTable
from visual_grpo.trained_adapters import HELD_OUT, HISTORY, NONE, judged_by_other_code, modules_of, read_facts

if TYPE_CHECKING:
    import pandas as pd

    from visual_grpo.rewards.combine import RewardSet
    from visual_grpo.types import PromptRecord

SAMPLER = "stock"


def compare_adapters(parameters: Parameters, records: RecordTable, comparison_draft: Path) -> Path:
    """The folder with both sides' samples and the report; the parameters are those of the second's training."""
    from visual_grpo import console
    from visual_grpo.evaluation import compare, report
    from visual_grpo.evaluation.headline import headline, lines

    first, second = (_side(named, parameters) for named in (parameters.compare.first, parameters.compare.second))
    if first.folder is None and second.folder is None:
        raise UserError("compare: first and second are both none, the base model; name an adapter")
    shared = _shared(records, (first, second))
    before, after = comparison_draft / "first", comparison_draft / "second"
    scorer = _scorer(parameters, second.facts or first.facts, shared)
    _draw(parameters, first, first.facts or second.facts, shared, scorer, before)
    _draw(parameters, second, second.facts or first.facts, shared, scorer, after)
    settings = parameters.evaluation
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


def _side(named: str, parameters: Parameters) -> Side:
    from visual_grpo.tracking.adapters import find_adapters

    if named == NONE:
        return Side("the base model", None, {})
    folder = find_adapters(named, Path(parameters.adapters_folder))
    facts = read_facts(folder)
    trained = f"{'+'.join(modules_of(folder))}, {counted(facts['steps'], 'step')}, seed {facts['seed']}"
    return Side(f"{named} ({trained})", folder, facts)


def _shared(records: RecordTable, sides: Sequence[Side]) -> list[PromptRecord]:
    """The held-out records whose prompts neither training has seen."""
    from visual_grpo import console

    held_out = list(records.split("held_out"))
    unseen = held_out
    for side in sides:
        if side.facts and side.facts["data"] != records.digest:
            known = _held_out_of(side)
            unseen = [record for record in unseen if record.prompt in known]
    if not unseen:
        raise UserError(
            f"compare: none of the {len(held_out)} held-out prompts of these data is held out in both trainings, so"
            " nothing can be compared that neither has seen. Compare where one of them was trained: the same --env and"
            " data.path."
        )
    if len(unseen) < len(held_out):
        console.note(f"Other data: compared on the {len(unseen)} of {len(held_out)} held-out prompts that both share.")
    return unseen


def _held_out_of(side: Side) -> set[str]:
    file = (side.folder or Path()) / HELD_OUT
    if not file.is_file():
        raise UserError(
            f"compare: {side.name} was trained on other data, and its folder does not say on which prompts: it is of an"
            f" older version, without {HELD_OUT}."
        )
    return set(json.loads(file.read_text(encoding="utf-8")))


def _scorer(parameters: Parameters, facts: dict[str, Any], records: Sequence[PromptRecord]) -> RewardSet:
    """Of both sides, with the weights of the modules that were trained in the training of ``facts``."""
    from visual_grpo import components

    scorer = components.build_scorer(
        parameters, components.make_plan(_of_side(parameters, facts), facts["model"]).modules
    )
    scorer.check_records(records)
    return scorer


def _draw(
    parameters: Parameters,
    side: Side,
    facts: dict[str, Any],
    records: Sequence[PromptRecord],
    scorer: RewardSet,
    folder: Path,
) -> None:
    """The side's samples and scores; ``facts`` name the base model and the trained modules."""
    from visual_grpo import components, console
    from visual_grpo.evaluation import generate

    config = _of_side(parameters, facts)
    settings = parameters.evaluation
    requests = generate.plan_images(
        {"held_out": records},
        seed=settings.seed,
        images_per_prompt=settings.images_per_prompt,
        max_prompts=settings.max_prompts,
    )
    samplers = {SAMPLER: parameters.sampling.stock}
    model = components.build_model(config, facts["model"], side.folder)
    with console.progress(folder.name, len(requests)) as bar:
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
