"""The gate: candidate, champion and base model are drawn in one job; the alias moves last. And the way back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from visual_grpo.common import console
from visual_grpo.common.errors import UserError, counted
from visual_grpo.config import Parameters
from visual_grpo.config.adapter_folder import NONE, adapter_digest
from visual_grpo.config.command import Command
from visual_grpo.data.table import SEALED, RecordTable
from visual_grpo.evaluation import compare, report
from visual_grpo.evaluation.draw import distinct_prompts, read_scores
from visual_grpo.evaluation.gate import decide, subgroups_of
from visual_grpo.evaluation.verdict import headline
from visual_grpo.operations.candidates import (
    BASE,
    Side,
    find_side,
    gate_settings,
    judge_differences,
    reward_differences,
    side_of,
)
from visual_grpo.pipelines.compare import draw, shared_scorer, unseen
from visual_grpo.tracking.registry import Registered, Registry

HELD_OUT = "held_out"
SPLITS = (HELD_OUT, SEALED)
"""The gate's stages: sealed prompts, if there are any, are drawn only for what holds on the held-out ones."""
CHAMPION, BASE_MODEL = "champion", "base model"


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
    references = _references(candidate, champion)
    if refusal := _refusal(parameters, registry, candidate, references):
        return promotion_draft, known | {"sentence": f"Not promoted: {candidate.name} {refusal}"}
    _check_number_of_gates(parameters, registry, digest)
    stages = _stages(parameters, records, candidate, references, promotion_draft)
    _write_report(parameters, candidate, stages, promotion_draft, next(iter(references)))
    last = list(stages.values())[-1]  # It is reached only if the others hold.
    return promotion_draft, known | {"promoted": last["promoted"], "sentence": last["sentence"], "stages": stages}


def promote(parameters: Parameters, promotion: Path, judgement: dict[str, Any]) -> dict[str, Any]:
    """Registers what was judged better as a version and moves the alias to it, last; returns what became of it."""
    registry = Registry.of(parameters)
    adapters, digest = _folder(_candidate(parameters)), judgement["candidate"]["digest"]
    champion, judged_against = registry.champion(), judgement["champion"]
    now = None if champion is None else champion.digest
    # After a crash, the candidate may be champion already.
    if adapter_digest(adapters) != digest or now not in (judged_against and judged_against["digest"], digest):
        raise UserError(
            "promote: candidate or champion is not the one that was judged. Judge it again:"
            f" {Command.current().for_pipeline('promote')}"
        )
    # First, for it may fail: once the alias has moved, the gate is not repeated.
    registry.keep_report(judgement["candidate"]["run_id"], promotion)
    said = [judgement["sentence"]]
    said += [f"Note: {note}" for stage in judgement["stages"].values() for note in stage["notes"]]
    version = judged_against["version"] if judgement["already"] else None
    if judgement["promoted"] and not judgement["already"]:
        stages = {"gate.stages": ", ".join(judgement["stages"])}
        version = registry.register(adapters, said, stages).version
        registry.promote(version)
    # What is noted need not be judged again, so this comes last; also of a champion, where a kill left it undone.
    if not judgement["already"] or not registry.is_judged(digest):
        registry.note_gate(digest, gate_settings(parameters), promoted=judgement["promoted"])
    for line in said:
        console.note(line)
    if version is not None:
        console.note(f"models:/{registry.name}@{registry.alias} is version {version} now.")
    return judgement | {"model": registry.name, "alias": registry.alias, "version": version}


def roll_back(parameters: Parameters) -> dict[str, Any]:
    """Puts the alias back on the version that the champion replaced; returns both versions."""
    registry = Registry.of(parameters)
    before, after = registry.rollback()
    console.note(f"models:/{registry.name}@{registry.alias} is version {after} again, as before version {before}.")
    return {"model": registry.name, "alias": registry.alias, "from": before, "to": after}


def _candidate(parameters: Parameters) -> Side:
    if parameters.promotion.candidate == NONE:
        raise UserError("promotion.candidate is none, the base model: name an adapter")
    return find_side(parameters.promotion.candidate, parameters)


def _folder(side: Side) -> Path:
    assert side.folder is not None
    return side.folder


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


def _refusal(parameters: Parameters, registry: Registry, candidate: Side, references: Mapping[str, Side]) -> str | None:
    """Why the candidate is not even drawn, and the command if that is intended; None if it is to be judged."""
    again, settings = Command.current().for_pipeline("promote"), parameters.promotion
    undone = registry.rolled_back(adapter_digest(_folder(candidate)))
    if undone is not None and not settings.rolled_back:  # Somebody had a reason, which the gate does not know.
        return (
            f"is version {undone[0]} of {registry.name}, which was rolled back on {undone[1]}. If it may be champion"
            f" again: {again.with_parameters({'promotion.rolled_back': True})}"
        )
    champion = references.get(CHAMPION)
    changed = [] if champion is None else reward_differences(champion, candidate)
    if changed and not settings.new_reward:  # Its own reward calls it better, whatever went wrong there.
        return (
            f"was trained with another reward than the champion ({'; '.join(changed)}). If that is intended, judge both"
            f" by the new reward: {again.with_parameters({'promotion.new_reward': True})}"
        )
    return None


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
    """What the candidate is compared with: first the champion, if there is one.

    Raises:
        UserError: the champion is of another base model or task.
    """
    if champion is None:
        return {BASE_MODEL: BASE}
    side = side_of(f"champion {champion.version}", champion.adapters())
    now, before = (
        {
            "base model": str(facts.get("model_content") or facts["model_digest"])[:12],
            "task": facts["parameters"]["data"]["task"],
        }
        for facts in (candidate.facts, side.facts)
    )
    if now != before:
        raise UserError(
            f"The champion (version {champion.version} of {champion.name}) has another base model or task than the"
            f" candidate: {before}, not {now}. Promote the candidate under another name: promotion.model=NAME"
        )
    return {CHAMPION: side, BASE_MODEL: BASE}


def _stages(
    parameters: Parameters, records: RecordTable, candidate: Side, references: Mapping[str, Side], folder: Path
) -> dict[str, Any]:
    """Split -> its decision, until one does not hold; the sealed records are checked even if they are not drawn.

    Every side is drawn on the same prompts and seeds.
    """
    sides, settings = {"candidate": candidate, **references}, parameters.promotion
    judged = {
        split: distinct_prompts(unseen(records, list(sides.values()), "promote", split), settings.max_prompts)
        for split in SPLITS
        if split == HELD_OUT or len(records.split(split))
    }
    scorer = shared_scorer(parameters, candidate.facts, [record for found in judged.values() for record in found])
    stages: dict[str, Any] = {}
    for split, found in judged.items():
        groups = subgroups_of(found, settings.subgroups)
        scores = {}
        for name, side in sides.items():
            drawn = _drawn(folder, split, name)
            draw(parameters, side, side.facts or candidate.facts, found, scorer, drawn, split=split)
            scores[name] = read_scores(drawn)
        decision = decide(scores.pop("candidate"), scores, settings, groups)
        stages[split] = decision.as_json()
        if not decision.promoted:
            break
    return stages


def _drawn(folder: Path, split: str, side: str) -> Path:
    return folder / split / side.replace(" ", "_")


def _write_report(
    parameters: Parameters, candidate: Side, stages: Mapping[str, Any], folder: Path, reference: str
) -> None:
    """The page of the candidate against the champion, or against the base model where there is none."""
    before, after = (_drawn(folder, HELD_OUT, name) for name in (reference, "candidate"))
    settings, scores = parameters.evaluation, read_scores(after)
    entries = compare.compare(
        read_scores(before), scores, bootstrap_samples=settings.bootstrap_samples, seed=settings.seed
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
    report.write_report(folder, evaluation, before, after, report.read_history(_folder(candidate)))
