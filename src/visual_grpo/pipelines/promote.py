"""The gate: candidate, champion and base model are drawn in one job; the alias moves last; on request."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from visual_grpo import console
from visual_grpo.command import Command
from visual_grpo.config import Parameters
from visual_grpo.config.presets import pinned
from visual_grpo.errors import UserError, counted
from visual_grpo.evaluation import compare, generate, report
from visual_grpo.evaluation.gate import GateDecision, decide, subgroups_of
from visual_grpo.evaluation.generate import distinct_prompts
from visual_grpo.evaluation.headline import headline
from visual_grpo.pipelines.compare import BASE, Side, draw, find_side, shared_scorer, side_of, unseen
from visual_grpo.records.split import SEALED
from visual_grpo.records.table import RecordTable
from visual_grpo.rewards.catalogue import reward_digests
from visual_grpo.rewards.combine import RewardSet
from visual_grpo.tracking.registry import Registered, Registry
from visual_grpo.trained_adapters import CODE, COMMIT, FILE, NONE, adapter_digest, modules_of, read_history
from visual_grpo.types import PromptRecord

HELD_OUT = "held_out"
SPLITS = (HELD_OUT, SEALED)
"""The gate's stages: sealed prompts, if there are any, are drawn only for what holds on the held-out ones."""
CHAMPION, BASE_MODEL = "champion", "base model"
_NOT_SCORED = ("weight", "max_failed_share")
"""Parameters of a reward that change nothing in a score; weights are compared as the modules have them."""


def gate_settings(parameters: Parameters) -> str:
    """64 hex digits: the same for parameters with which a gate comes to the same decision."""
    promotion = parameters.promotion.model_dump(mode="json", exclude={"candidate", "model", "alias", "base_copy_mb"})
    drawn = parameters.evaluation.model_dump(mode="json", include={"seed", "images_per_prompt"})
    return hashlib.sha256(json.dumps([promotion, drawn], sort_keys=True).encode()).hexdigest()


def judge(parameters: Parameters, records: RecordTable, promotion_draft: Path) -> tuple[Path, dict[str, Any]]:
    """The folder with every side's samples and the report, and the gate's decision.

    Nothing is drawn where the candidate is the champion already. The parameters are those of the candidate's training.
    """
    registry = Registry.of(parameters)
    candidate, champion = _candidate(parameters), registry.champion()
    digest = adapter_digest(_folder(candidate))
    if changed := judge_differences(candidate, parameters):
        raise UserError(
            f"promote: the rewards that would judge {candidate.name} are not those that it was trained with"
            f" ({'; '.join(changed)}). Put the code back as it was and leave such parameters out, or train again."
        )
    known: dict[str, Any] = {
        "candidate": {"name": candidate.name, "digest": digest, "run_id": candidate.facts.get("mlflow_run_id")},
        "champion": None if champion is None else {"version": champion.version, "digest": champion.digest},
        "promoted": False,
        "already": False,
        "stages": {},
    }
    if champion is not None and champion.digest == digest:
        sentence = f"{candidate.name} is the champion already, version {champion.version} of {registry.name}."
        stages = _earlier_stages(parameters, digest, promotion_draft)
        return promotion_draft, known | {"promoted": True, "already": True, "sentence": sentence, "stages": stages}
    again = Command.now().of_pipeline("promote")
    undone = None if parameters.promotion.rolled_back else registry.rolled_back(digest)
    if undone is not None:  # Somebody had a reason, which the gate does not know.
        sentence = (
            f"Not promoted: {candidate.name} is version {undone[0]} of {registry.name}, which was rolled back on"
            f" {undone[1]}. If it may be champion again: {again.adding({'promotion.rolled_back': True})}"
        )
        return promotion_draft, known | {"sentence": sentence}
    _check_number_of_gates(parameters, registry, digest)
    references = _references(candidate, champion)
    changed = [] if champion is None else reward_differences(references[CHAMPION], candidate)
    if changed and not parameters.promotion.new_reward:  # Its own reward calls it better, whatever went wrong there.
        sentence = (
            f"Not promoted: {candidate.name} was trained with another reward than the champion ({'; '.join(changed)})."
            f" If that is intended, judge both by the new reward: {again.adding({'promotion.new_reward': True})}"
        )
        return promotion_draft, known | {"sentence": sentence}
    stages = _stages(parameters, records, candidate, references, promotion_draft)
    _write_report(parameters, candidate, stages, promotion_draft, CHAMPION if champion is not None else BASE_MODEL)
    last = list(stages.values())[-1]  # It is reached only if the others hold.
    return promotion_draft, known | {"promoted": last["promoted"], "sentence": last["sentence"], "stages": stages}


def promote(parameters: Parameters, promotion: Path, judgement: dict[str, Any]) -> dict[str, Any]:
    """Registers what was judged better as a version and moves the alias to it, last; returns what became of it."""
    registry = Registry.of(parameters)
    _check_unchanged(parameters, registry, judgement)
    # First, for it may fail: once the alias has moved, the gate is not repeated.
    registry.keep_report(judgement["candidate"]["run_id"], promotion)
    said = [judgement["sentence"]]
    said += [f"Note: {note}" for stage in judgement["stages"].values() for note in stage["notes"]]
    version = judgement["champion"]["version"] if judgement["already"] else None
    if judgement["promoted"] and not judgement["already"]:
        stages = {"gate.stages": ", ".join(judgement["stages"])}
        version = registry.register(_folder(_candidate(parameters)), said, stages).version
        registry.promote(version)
    # What is noted need not be judged again, so this comes last; also of a champion, where a kill left it undone.
    digest = judgement["candidate"]["digest"]
    if not judgement["already"] or not registry.is_judged(digest):
        registry.note_gate(digest, gate_settings(parameters), promoted=judgement["promoted"])
    for line in said:
        console.note(line)
    if version is not None:
        console.note(f"models:/{registry.name}@{registry.alias} is version {version} now.")
    return judgement | {"model": registry.name, "alias": registry.alias, "version": version}


def _candidate(parameters: Parameters) -> Side:
    if parameters.promotion.candidate == NONE:
        raise UserError("promotion.candidate is none, the base model: name an adapter")
    return find_side(parameters.promotion.candidate, parameters)


def _folder(side: Side) -> Path:
    assert side.folder is not None
    return side.folder


def _check_unchanged(parameters: Parameters, registry: Registry, judgement: Mapping[str, Any]) -> None:
    """Raises UserError where the decision is of another adapter, or against another champion, than there are now."""
    champion = registry.champion()
    now = None if champion is None else champion.digest
    before = None if judgement["champion"] is None else judgement["champion"]["digest"]
    candidate = adapter_digest(_folder(_candidate(parameters)))
    # After a crash, the candidate may be champion already.
    if candidate != judgement["candidate"]["digest"] or now not in (before, candidate):
        what = "candidate" if candidate != judgement["candidate"]["digest"] else "champion"
        raise UserError(
            f"promote: the {what} is not the one that was judged. Judge it again:"
            f" {Command.now().of_pipeline('promote')}"
        )


def _earlier_stages(parameters: Parameters, digest: str, draft: Path) -> dict[str, Any]:
    """The decision that made the candidate champion, if its report is still there; the report stays."""
    folder = Path(parameters.output) / "08_reporting"
    try:
        judgement = json.loads((folder / "judgement.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if judgement["candidate"]["digest"] != digest or not (folder / "promotion").is_dir():
        return {}
    shutil.copytree(folder / "promotion", draft, dirs_exist_ok=True)
    stages: dict[str, Any] = judgement["stages"]
    return stages


def _check_number_of_gates(parameters: Parameters, registry: Registry, digest: str) -> None:
    """The error of a year is divided among so many gates, and holds for no more of them."""
    limit = parameters.promotion.gates_per_year
    asked = registry.gates_of_a_year(but=(digest, gate_settings(parameters)))
    if asked >= limit:
        raise UserError(
            f"promotion.gates_per_year is {limit}, and {counted(asked, 'adapter')} asked to become"
            f" {registry.name}@{registry.alias} within the last 365 days. Wait, or raise gates_per_year, which"
            " asks for a larger gain."
        )


def _references(candidate: Side, champion: Registered | None) -> dict[str, Side]:
    """What the candidate is compared with.

    Raises:
        UserError: the champion is of another base model or task.
    """
    if champion is None:
        return {BASE_MODEL: BASE}
    side = side_of(f"champion {champion.version}", champion.adapters())
    bases = [str(facts.get("model_content") or facts["model_digest"])[:12] for facts in (candidate.facts, side.facts)]
    tasks = [str(facts["parameters"]["data"]["task"]) for facts in (candidate.facts, side.facts)]
    for what, (now, before) in {"base model": bases, "task": tasks}.items():
        if now != before:
            raise UserError(
                f"The champion (version {champion.version} of {champion.name}) has another {what} than the candidate:"
                f" {before}, not {now}. Promote the candidate under another name: promotion.model=NAME"
            )
    return {CHAMPION: side, BASE_MODEL: BASE}


def _stages(
    parameters: Parameters, records: RecordTable, candidate: Side, references: Mapping[str, Side], folder: Path
) -> dict[str, Any]:
    """Split -> its decision, until one does not hold; the sealed records are checked even if they are not drawn."""
    sides, most = [candidate, *references.values()], parameters.promotion.max_prompts
    judged = {
        split: distinct_prompts(unseen(records, sides, "promote", split), most)
        for split in SPLITS
        if split == HELD_OUT or len(records.split(split))
    }
    scorer = shared_scorer(parameters, candidate.facts, [record for found in judged.values() for record in found])
    stages: dict[str, Any] = {}
    for split, found in judged.items():
        decision = _judge_on(split, parameters, found, scorer, candidate, references, folder)
        stages[split] = decision.as_json()
        if not decision.promoted:
            break
    return stages


def _judge_on(
    split: str,
    parameters: Parameters,
    records: Sequence[PromptRecord],
    scorer: RewardSet,
    candidate: Side,
    references: Mapping[str, Side],
    folder: Path,
) -> GateDecision:
    """Draws every side on the same prompts and seeds, and decides."""
    groups = subgroups_of(records, parameters.promotion.subgroups)
    scores = {}
    for name, side in {"candidate": candidate, **references}.items():
        drawn = folder / split / name.replace(" ", "_")
        draw(parameters, side, side.facts or candidate.facts, records, scorer, drawn, split=split)
        scores[name] = generate.read_scores(drawn)
    return decide(scores.pop("candidate"), scores, parameters.promotion, groups)


def _write_report(
    parameters: Parameters, candidate: Side, stages: Mapping[str, Any], folder: Path, reference: str
) -> None:
    """The page of the candidate against the champion, or against the base model where there is none."""
    before, after = (folder / HELD_OUT / name for name in (reference.replace(" ", "_"), "candidate"))
    settings, scores = parameters.evaluation, generate.read_scores(after)
    entries = compare.compare(
        generate.read_scores(before), scores, bootstrap_samples=settings.bootstrap_samples, seed=settings.seed
    )
    evaluation = {
        "headline": headline(entries, names=(f"the {reference}", candidate.name)),
        "gate": stages,
        "adapter": f"{candidate.name} against the {reference}",
        "training": candidate.facts,
        "parameters": parameters.public(),  # The training's, with those of this promotion.
        "conditions": scores.attrs["facts"],
        "rewards": entries,
        "controls": [],
    }
    report.write_report(folder, evaluation, before, after, read_history(_folder(candidate)))


def reward_differences(champion: Side, candidate: Side) -> list[str]:
    """In what the rewards of two trainings differ, such as ``weight of ocr: 1, now -1``; empty if they are the same."""
    return _differences(_rewards_of_training(champion), _rewards_of_training(candidate))


def judge_differences(candidate: Side, present: Parameters) -> list[str]:
    """In what the present rewards differ from those of the candidate's training: parameters, code, files, weights."""
    digests = reward_digests(present.rewards, present.output)
    return _differences(_rewards_of_training(candidate), _rewards(present, candidate) | digests)


def _rewards_of_training(side: Side) -> dict[str, Any]:
    config = Parameters.model_validate(pinned(side.facts["parameters"]))
    digests = {name: value for name, value in side.facts.items() if name.startswith((CODE, FILE, COMMIT))}
    return _rewards(config, side) | digests


def _rewards(config: Parameters, side: Side) -> dict[str, Any]:
    """What each reward's value and its share in the total depend on, beside code and files."""
    weights = config.weights(modules_of(_folder(side)))
    found: dict[str, Any] = {f"weight of {name}": weight for name, weight in weights.items()}
    for name, reward in config.public()["rewards"].items():
        found |= {f"{key} of {name}": value for key, value in reward.items() if key not in _NOT_SCORED}
    return found


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    return [f"{name}: {_shown(before.get(name))}, now {_shown(now.get(name))}" for name in names]


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    text = "none" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:12]}..."
