"""The gate: candidate, champion and base model are drawn in one job; the alias moves last."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_grpo.command import Command
from visual_grpo.config import Parameters
from visual_grpo.errors import UserError, counted
from visual_grpo.pipelines.compare import BASE, Side, draw, find_side, shared_scorer, side_of, unseen
from visual_grpo.pipelines.promote.same_reward import judge_differences, reward_differences
from visual_grpo.records.split import SEALED
from visual_grpo.records.table import RecordTable
from visual_grpo.trained_adapters import NONE, adapter_digest, read_history

if TYPE_CHECKING:
    from visual_grpo.evaluation.gate import GateRule
    from visual_grpo.evaluation.gate_decision import GateDecision
    from visual_grpo.rewards.combine import RewardSet
    from visual_grpo.tracking.champions import Champions
    from visual_grpo.tracking.versions import Registered
    from visual_grpo.types import PromptRecord

HELD_OUT_SPLIT = "held_out"
SPLITS = (HELD_OUT_SPLIT, SEALED)
"""The gate's stages: sealed prompts, if there are any, are drawn only for what holds on the held-out ones."""
CHAMPION, BASE_MODEL = "champion", "base model"


def gate_settings(parameters: Parameters) -> str:
    """64 hex digits: the same for parameters with which a gate comes to the same decision."""
    promotion = parameters.promotion.model_dump(mode="json", exclude={"candidate", "model", "alias", "base_copy_mb"})
    drawn = parameters.evaluation.model_dump(mode="json", include={"seed", "images_per_prompt"})
    return hashlib.sha256(json.dumps([promotion, drawn], sort_keys=True).encode()).hexdigest()


def judge(parameters: Parameters, records: RecordTable, promotion_draft: Path) -> tuple[Path, dict[str, Any]]:
    """The folder with every side's samples and the report, and the gate's decision.

    Nothing is drawn where the candidate is the champion already. The parameters are those of the candidate's training.
    """
    from visual_grpo.tracking.champions import Champions

    registry = Champions.of(parameters)
    candidate, champion = _candidate(parameters), registry.champion()
    digest = adapter_digest(_folder(candidate))
    _check_judge(candidate, parameters)
    found: dict[str, Any] = {
        "candidate": {"name": candidate.name, "digest": digest, "run_id": candidate.facts.get("mlflow_run_id")},
        "champion": None if champion is None else {"version": champion.version, "digest": champion.digest},
    }
    if champion is not None and champion.digest == digest:
        sentence = f"{candidate.name} is the champion already, version {champion.version} of {registry.name}."
        earlier = _earlier_stages(parameters, digest, promotion_draft)
        return promotion_draft, found | {"promoted": True, "already": True, "sentence": sentence, "stages": earlier}
    undone = None if parameters.promotion.rolled_back else registry.rolled_back(digest)
    if undone is not None:
        return promotion_draft, found | _not_judged(_was_rolled_back(candidate, registry, *undone))
    _check_number_of_gates(parameters, registry, digest)
    references = _references(candidate, champion)
    changed = [] if champion is None else reward_differences(references[CHAMPION], candidate)
    if changed and not parameters.promotion.new_reward:
        return promotion_draft, found | _not_judged(_aims_at_something_else(candidate, changed))
    judged = _judged(parameters, records, [candidate, *references.values()])
    scorer = shared_scorer(
        parameters, candidate.facts, [record for found_there in judged.values() for record in found_there]
    )
    stages: dict[str, Any] = {}
    for split, found_there in judged.items():
        decision = _judge_on(split, parameters, found_there, scorer, candidate, references, promotion_draft)
        stages[split] = decision.as_json()
        if not decision.promoted:
            break
    _write_report(parameters, candidate, champion, stages, promotion_draft)
    return promotion_draft, found | _outcome(stages)


def promote(parameters: Parameters, promotion: Path, judgement: dict[str, Any]) -> dict[str, Any]:
    """Registers what was judged better as a version and moves the alias to it, last; returns what became of it."""
    from visual_grpo import console
    from visual_grpo.tracking.champions import Champions

    registry = Champions.of(parameters)
    _check_unchanged(parameters, registry, judgement)
    # First, for it may fail: once the alias has moved, the gate is not repeated.
    registry.keep_report(judgement["candidate"]["run_id"], promotion)
    version = judgement["champion"]["version"] if judgement["already"] else None
    if judgement["promoted"] and not judgement["already"]:
        stages = {"gate.stages": ", ".join(judgement["stages"])}
        version = registry.register(_folder(_candidate(parameters)), _said(judgement), stages)
        registry.promote(version)
    # What is noted need not be judged again, so this comes last; also of a champion, where a kill left it undone.
    digest = judgement["candidate"]["digest"]
    if not judgement["already"] or not registry.is_judged(digest):
        registry.note_gate(digest, gate_settings(parameters), promoted=judgement["promoted"])
    for line in _said(judgement):
        console.note(line)
    if version is not None:
        console.note(f"models:/{registry.name}@{registry.alias} is version {version} now.")
    return judgement | {"model": registry.name, "alias": registry.alias, "version": version}


def _said(judgement: Mapping[str, Any]) -> list[str]:
    """The decision, and what must be known of it."""
    notes = [f"Note: {note}" for stage in judgement["stages"].values() for note in stage["notes"]]
    return [judgement["sentence"], *notes]


def _check_judge(candidate: Side, parameters: Parameters) -> None:
    """Raises UserError where the candidate would be judged by something else than it was trained with."""
    changed = judge_differences(candidate, parameters)
    if changed:
        raise UserError(
            f"promote: the rewards that would judge {candidate.name} are not those that it was trained with"
            f" ({'; '.join(changed)}). Put the code back as it was and leave such parameters out, or train again."
        )


def _check_unchanged(parameters: Parameters, registry: Champions, judgement: Mapping[str, Any]) -> None:
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
        judgement: dict[str, Any] = json.loads((folder / "judgement.json").read_text(encoding="utf-8"))
        same = judgement["candidate"]["digest"] == digest
    except (OSError, ValueError, KeyError):
        return {}
    if not same or not (folder / "promotion").is_dir():
        return {}
    shutil.copytree(folder / "promotion", draft, dirs_exist_ok=True)
    stages: dict[str, Any] = judgement["stages"]
    return stages


def _candidate(parameters: Parameters) -> Side:
    if parameters.promotion.candidate == NONE:
        raise UserError("promotion.candidate is none, the base model: name an adapter")
    return find_side(parameters.promotion.candidate, parameters)


def _folder(side: Side) -> Path:
    assert side.folder is not None
    return side.folder


def _check_number_of_gates(parameters: Parameters, registry: Champions, digest: str) -> None:
    """The error of a year is divided among so many gates, and holds for no more of them."""
    limit = parameters.promotion.gates_per_year
    asked = registry.gates_of_a_year(but=(digest, gate_settings(parameters)))
    if asked >= limit:
        raise UserError(
            f"promotion.gates_per_year is {limit}, and {counted(asked, 'adapter')} asked to become"
            f" {registry.name}@{registry.alias} within the last 365 days. With more of them the probability of a false"
            f" promotion exceeds promotion.error = {parameters.promotion.error:g}. Wait, or raise"
            " promotion.gates_per_year, which asks for a larger gain."
        )


def _references(candidate: Side, champion: Registered | None) -> dict[str, Side]:
    """What the candidate is compared with.

    Raises:
        UserError: the champion is of another base model or task.
    """
    if champion is None:
        return {BASE_MODEL: BASE}
    side = side_of(f"champion {champion.version}", champion.adapters())
    for what, value in {"base model": _base, "task": _task}.items():
        now, before = value(candidate.facts), value(side.facts)
        if now != before:
            raise UserError(
                f"The champion (version {champion.version} of {champion.name}) has another {what} than the candidate:"
                f" {before}, not {now}. Their results do not compare. Promote the candidate under another name:"
                " promotion.model=NAME"
            )
    return {CHAMPION: side, BASE_MODEL: BASE}


def _base(facts: Mapping[str, Any]) -> str:
    return str(facts.get("model_content") or facts["model_digest"])[:12]


def _task(facts: Mapping[str, Any]) -> str:
    return str(facts["parameters"]["data"]["task"])


def _judged(parameters: Parameters, records: RecordTable, sides: Sequence[Side]) -> dict[str, list[PromptRecord]]:
    """Split -> the records to draw: those of the sealed split are looked at even if they are not drawn then."""
    from visual_grpo.evaluation.generate import distinct_prompts

    splits = [split for split in SPLITS if split == HELD_OUT_SPLIT or len(records.split(split))]
    most = parameters.promotion.max_prompts
    return {split: distinct_prompts(unseen(records, sides, "promote", split), most) for split in splits}


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
    from visual_grpo.evaluation.gate import decide, subgroups_of
    from visual_grpo.evaluation.generate import read_scores

    rule = _rule(parameters)
    groups = subgroups_of(records, rule.subgroups)
    scores = {}
    for name, side in {"candidate": candidate, **references}.items():
        drawn = folder / split / name.replace(" ", "_")
        draw(parameters, side, side.facts or candidate.facts, records, scorer, drawn, split=split)
        scores[name] = read_scores(drawn)
    return decide(scores.pop("candidate"), scores, rule, groups)


def _rule(parameters: Parameters) -> GateRule:
    from visual_grpo.evaluation.gate import GateRule

    settings = parameters.promotion
    return GateRule(
        error=settings.error,
        gates_per_year=settings.gates_per_year,
        margin=settings.margin,
        max_guard_fall=settings.max_guard_fall,
        max_unscored_rise=settings.max_unscored_rise,
        subgroups=settings.subgroups,
    )


def _aims_at_something_else(candidate: Side, changed: Sequence[str]) -> str:
    """Its own reward would call it better, whatever went wrong with that reward."""
    intended = Command.now().of_pipeline("promote").adding({"promotion.new_reward": True})
    return (
        f"Not promoted: {candidate.name} was trained with another reward than the champion ({'; '.join(changed)})."
        f" If that is intended, judge both by the new reward: {intended}"
    )


def _was_rolled_back(candidate: Side, registry: Champions, version: int, date: str) -> str:
    """Somebody had a reason, which the gate does not know."""
    again = Command.now().of_pipeline("promote").adding({"promotion.rolled_back": True})
    return (
        f"Not promoted: {candidate.name} is version {version} of {registry.name}, which was rolled back on {date}. If"
        f" it may be champion again: {again}"
    )


def _not_judged(sentence: str) -> dict[str, Any]:
    return {"promoted": False, "already": False, "sentence": sentence, "stages": {}}


def _outcome(stages: Mapping[str, Any]) -> dict[str, Any]:
    """The decision of all stages: that of the last, which is reached only if the others hold."""
    last = list(stages.values())[-1]
    return {"promoted": last["promoted"], "already": False, "sentence": last["sentence"], "stages": dict(stages)}


def _write_report(
    parameters: Parameters, candidate: Side, champion: Registered | None, stages: Mapping[str, Any], folder: Path
) -> None:
    """The page: candidate against the champion, or against the base model where there is none."""

    from visual_grpo.evaluation import compare, generate, report
    from visual_grpo.evaluation.headline import headline

    reference = BASE_MODEL if champion is None else CHAMPION
    before, after = (folder / "held_out" / name for name in (reference.replace(" ", "_"), "candidate"))
    settings = parameters.evaluation
    entries = compare.compare(
        generate.read_scores(before),
        generate.read_scores(after),
        bootstrap_samples=settings.bootstrap_samples,
        seed=settings.seed,
    )
    evaluation = {
        "headline": headline(entries, names=(f"the {reference}", candidate.name)),
        "gate": stages,
        "adapter": f"{candidate.name} against the {reference}",
        "training": candidate.facts,
        "parameters": parameters.public(),  # The training's, with those of this promotion.
        "conditions": generate.read_scores(after).attrs["facts"],
        "rewards": entries,
        "controls": [],
    }
    report.write_report(folder, evaluation, before, after, read_history(_folder(candidate)))
