"""Models that are compared or promoted: adapters or the base model, on prompts that none was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from visual_grpo import provenance
from visual_grpo.adapter_folder import LATEST, NONE, REWARD_CODE, REWARD_COMMIT, REWARD_FILE, modules_of, read_facts
from visual_grpo.common import console
from visual_grpo.common.errors import UserError, counted
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import Parameters
from visual_grpo.config.decides import Decides
from visual_grpo.data.manifest import RecordTable, read_seen, seen_keys
from visual_grpo.data.splits import HELD_OUT
from visual_grpo.evaluation.comparison import EVAL_SAMPLER
from visual_grpo.evaluation.samples import generate_and_score, requests
from visual_grpo.models.run_spec import RunSpec, resolve
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.tracking.adapter_lookup import find_adapters
from visual_grpo.tracking.trust import require_adapters, require_version
from visual_grpo.training import components


@dataclass(frozen=True)
class ComparedModel:
    """A training's adapters, or the base model."""

    name: str
    folder: Path | None
    facts: dict[str, Any]
    """``training.json`` of the training; empty for the base model."""

    @property
    def adapters(self) -> Path:
        """The folder of a model that is not the base model."""
        assert self.folder is not None
        return self.folder


BASE = ComparedModel("the base model", None, {})


def find_model(named: str, latest: Path, parameters: Parameters) -> ComparedModel:
    """Returns the adapters that a parameter names, or the base model; raises as `model_in` does."""
    if named == NONE:
        return BASE
    return model_in(named, find_adapters(named, latest), parameters)


def model_in(name: str, folder: Path, parameters: Parameters) -> ComparedModel:
    """Returns the adapters in ``folder``, with a name for people.

    Raises UserError if generating with ``parameters`` would take from their provenance what a stranger's may not have.
    """
    facts = read_facts(folder)
    require_version(folder, facts.get("parameters", {}))
    require_adapters(folder, _alike(parameters, facts).model_dump(mode="json"), parameters)
    trained = f"{'+'.join(modules_of(folder))}, {counted(facts['steps'], 'step')}, seed {facts['seed']}"
    run = f" {facts['mlflow_run_id'][:8]}" if name == LATEST and facts.get("mlflow_run_id") else ""
    return ComparedModel(f"{name}{run} ({trained})", folder, facts)


def unseen(
    records: RecordTable, models: Sequence[ComparedModel], task: str, split: str = HELD_OUT
) -> list[PromptRecord]:
    """Returns the records of ``split`` that no model has seen in its training; ``task`` is the pipeline."""
    rows = records.split(split)
    seen: set[str] = set()
    for model in models:
        if model.folder is not None and (model.facts["data"] != records.digest or "start" in model.facts):
            seen |= read_seen(model.folder)
    new = [record for record, row in zip(rows, rows.rows(), strict=True) if seen.isdisjoint(seen_keys(row))]
    shown = split.replace("_", "-")
    if not rows:
        raise UserError(
            f"{task}: none of these records is {split.replace('_', ' ')}, so there is nothing to judge by. Add"
            f" records, or raise data.{split}_share if it is 0."
        )
    if not new:
        raise UserError(
            f"{task}: each of the {len(rows)} {shown} records of these data was seen by one of the trainings. Compare"
            " where one of them was trained: the same --env and data.path."
        )
    if len(new) < len(rows):
        console.note(f"Compared on the {len(new)} of {len(rows)} {shown} records that no training has seen.")
    return new


def shared_scorer(parameters: Parameters, facts: Mapping[str, Any], records: Sequence[PromptRecord]) -> RewardSet:
    """Builds the scorer of all models, with the weights of the modules of the training with these ``facts``."""
    scorer = components.build_scorer(sampled_alike(parameters, facts))
    scorer.check_machine()
    scorer.check_records(records)
    return scorer


def sample_model(
    parameters: Parameters,
    model: ComparedModel,
    other: ComparedModel,
    records: Sequence[PromptRecord],
    scorer: RewardSet,
    folder: Path,
    *,
    split: str = HELD_OUT,
) -> pd.DataFrame:
    """Generates and scores the model's samples of the records; a base model is the one of the ``other``'s training."""
    facts = model.facts or other.facts
    spec = sampled_alike(parameters, facts)
    settings, sampler = spec.config.evaluation, spec.config.sampling.eval
    asked = requests(records, settings.images_per_prompt, settings.seed, split)
    with console.progress(f"{folder.name.replace('_', ' ')}: samples", len(asked)) as bar:
        return generate_and_score(
            components.build_model(spec, model.folder),
            scorer,
            {EVAL_SAMPLER: (sampler, asked)},
            folder,
            batch_size=settings.batch_size,
            advance=bar.advance,
        )


def reward_differences(champion: ComparedModel, candidate: ComparedModel) -> list[str]:
    """Lists how the rewards of two trainings differ, such as ``rewards.ocr.weight (was 1, is -1)``."""
    return _score_differences(_rewards_of(champion.facts, champion), _rewards_of(candidate.facts, candidate))


def judge_differences(candidate: ComparedModel, now: provenance.Provenance) -> list[str]:
    """Lists how the present rewards differ from the candidate's training: parameters, code, files, weights."""
    return _score_differences(_rewards_of(candidate.facts, candidate), _rewards_of(now, candidate))


def _rewards_of(training: provenance.Provenance, model: ComparedModel) -> dict[str, Any]:
    """Returns what scores and totals of ``model``'s modules depend on, with the weights that they have."""
    config = Parameters.model_validate(training["parameters"])
    weights, tree = config.weights(modules_of(model.adapters)), config.public()["rewards"]
    learned = [name for name, reward in config.rewards.items() if not reward.judge]  # No judge changes an adapter.
    digests = {
        entry: digest
        for entry, digest in training.items()
        for kind in (REWARD_CODE, REWARD_FILE, REWARD_COMMIT)
        if entry.startswith(kind) and entry.removeprefix(kind).partition(": ")[0] in learned
    }
    return {"parameters": {"rewards": {name: tree[name] | {"weight": weights[name]} for name in learned}}, **digests}


def _score_differences(before: provenance.Provenance, now: provenance.Provenance) -> list[str]:
    about = Decides.SCORES | Decides.JUDGEMENT
    return provenance.described(provenance.differences(before, now, about))


def sampled_alike(parameters: Parameters, facts: Mapping[str, Any]) -> RunSpec:
    """Resolves ``parameters`` with the base model and modules of a training; all else is shared."""
    return resolve(_alike(parameters, facts))


def _alike(parameters: Parameters, facts: Mapping[str, Any]) -> Parameters:
    training = Parameters.model_validate(facts["parameters"])
    trained = {"train": training.policy.train, "stages": training.policy.stages}
    model = {"path": facts["model"], "device": parameters.model.device}
    return parameters.model_copy(
        update={
            "policy": parameters.policy.model_copy(update=trained),
            "model": training.model.model_copy(update=model),
        }
    )
