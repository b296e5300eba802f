"""The gate of a promotion: candidate, champion and base model are sampled in one job and judged by the same rewards."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from visual_grpo.adapter_folder import NONE, weights_digest
from visual_grpo.common import console
from visual_grpo.common.errors import UserError, counted
from visual_grpo.common.files import require_no_links
from visual_grpo.config import Parameters, PromotionConfig
from visual_grpo.data.manifest import RecordTable
from visual_grpo.data.splits import HELD_OUT, SEALED
from visual_grpo.evaluation.gate import decide, subgroups_of
from visual_grpo.evaluation.samples import distinct_prompts
from visual_grpo.operations.candidates import (
    BASE,
    ComparedModel,
    find_model,
    model_in,
    reward_differences,
    sample_model,
    shared_scorer,
    unseen,
)
from visual_grpo.operations.command import Command
from visual_grpo.tracking.adapter_lookup import Registered
from visual_grpo.tracking.registry import NOT_PROMOTED, Registry

CHAMPION, BASE_MODEL = "champion", "base model"


class NotPromotedError(UserError):
    """The gate did not make the candidate champion; nothing has failed."""

    exit_code = NOT_PROMOTED


def find_candidate(named: str, latest: Path, parameters: Parameters) -> ComparedModel:
    """Returns the adapters that ask to become champion; raises as `model_in` does."""
    if named == NONE:
        raise UserError("promotion.candidate is none, the base model: name an adapter")
    candidate = find_model(named, latest, parameters)
    require_no_links(candidate.adapters)  # Before anything is generated: no version could be made of it.
    return candidate


def find_references(
    candidate: ComparedModel, champion: Registered | None, parameters: Parameters
) -> dict[str, ComparedModel]:
    """Returns what the candidate is compared with, first the champion, which must be of its base model and task."""
    if champion is None:
        return {BASE_MODEL: BASE}
    model = model_in(f"champion {champion.version}", champion.adapters(), parameters)
    now, before = ((_base_of(facts), facts["parameters"]["data"]["task"]) for facts in (candidate.facts, model.facts))
    if now != before:
        raise UserError(
            f"The champion (version {champion.version} of {champion.name}) has a different base model or task than the"
            f" candidate: {before}, not {now}. Promote the candidate under a different name: promotion.model=NAME"
        )
    return {CHAMPION: model, BASE_MODEL: BASE}


def _base_of(facts: Mapping[str, Any]) -> str:
    """The base model's digest: that of its files, unless it is on the hub or a LoRA is merged into it."""
    content = None if "model_lora" in facts else facts.get("model_content")
    return str(content or facts["model_digest"])[:12]


def refusal(
    settings: PromotionConfig, registry: Registry, candidate: ComparedModel, references: Mapping[str, ComparedModel]
) -> str | None:
    """Says why the candidate is not judged, and the command that overrides it; None if it is to be judged."""
    again = Command.current().for_pipeline("promote")
    undone = registry.rolled_back(weights_digest(candidate.adapters))
    if undone is not None and not settings.rolled_back:  # Somebody had a reason, which the gate does not know.
        return (
            f"was rolled back from {registry.name}@{registry.alias} ({undone}). If it may be champion again:"
            f" {again.with_parameters({'promotion.rolled_back': True})}"
        )
    champion = references.get(CHAMPION)
    changed = [] if champion is None else reward_differences(champion, candidate)
    if changed and not settings.new_reward:  # Its own reward calls it better, whatever went wrong there.
        return (
            f"was trained with a different reward than the champion ({'; '.join(changed)}). If this is intended, judge"
            f" both by the new reward: {again.with_parameters({'promotion.new_reward': True})}"
        )
    return None


def check_number_of_gates(limit: int, registry: Registry, excluding: tuple[str, str]) -> None:
    """Raises UserError beyond ``gates_per_year``, among which the error of a year is divided.

    ``excluding`` are the digests of the candidate and of `gate_settings`.
    """
    if (latest := registry.ahead_of_clock()) is not None:
        console.note(
            f"Warning: the clock is behind {latest:%Y-%m-%d %H:%M} UTC, the latest date of {registry.name} in MLflow."
            " Gates decided with this clock count until one year after it has been corrected. Set the clock, or"
            " correct the tag gate... of the registered model if that date is wrong."
        )
    asked = registry.gates_in_last_year(excluding=excluding)
    if asked >= limit:
        raise UserError(
            f"promotion.gates_per_year is {limit}, and {counted(asked, 'adapter')} asked to become {registry.name}@"
            f"{registry.alias} within the last 365 days. Wait, or raise gates_per_year, which asks for a larger gain."
        )


def earlier_stages(promotion: Path, judgement_file: Path, digest: str, kept: Path) -> dict[str, Any]:
    """Returns the decision that made the candidate champion and keeps its report; empty if it is gone."""
    judgement = json.loads(judgement_file.read_text(encoding="utf-8")) if judgement_file.is_file() else None
    if judgement is None or judgement["candidate"]["digest"] != digest:
        return {}
    require_no_links(promotion)
    shutil.copytree(promotion, kept, dirs_exist_ok=True)
    return dict(judgement["stages"])


def judge_stages(
    parameters: Parameters,
    records: RecordTable,
    candidate: ComparedModel,
    references: Mapping[str, ComparedModel],
    folder: Path,
) -> dict[str, Any]:
    """Returns split -> decision, up to the first that does not hold; all models get the same prompts and seeds.

    Sealed prompts, if there are any, are used only if the held-out conditions hold, but are checked before.
    """
    models, settings = {"candidate": candidate, **references}, parameters.promotion
    judged = {
        split: distinct_prompts(unseen(records, list(models.values()), "promote", split), settings.max_prompts)
        for split in (HELD_OUT, SEALED)
        if split == HELD_OUT or len(records.split(split))
    }
    scorer = shared_scorer(parameters, candidate.facts, list(itertools.chain(*judged.values())))
    stages: dict[str, Any] = {}
    for split, chosen in judged.items():
        groups = subgroups_of(chosen, settings.subgroups)
        scores = {
            name: sample_model(
                parameters, model, candidate, chosen, scorer, samples_folder(folder, split, name), split=split
            )
            for name, model in models.items()
        }
        decision = decide(scores.pop("candidate"), scores, settings, groups)
        stages[split] = decision.as_json()
        if not decision.promoted:
            break
    return stages


def samples_folder(folder: Path, split: str, model: str) -> Path:
    """Returns where `judge_stages` keeps a model's samples."""
    return folder / split / model.replace(" ", "_")
