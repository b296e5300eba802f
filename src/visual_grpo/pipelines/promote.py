"""Nodes of promotion: the gate judges, then the alias moves, last. And the way back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from kedro.pipeline import Node, Pipeline

from visual_grpo import provenance
from visual_grpo.adapter_folder import weights_digest
from visual_grpo.common import console
from visual_grpo.common.errors import UserError
from visual_grpo.config import Parameters
from visual_grpo.data.manifest import RecordTable
from visual_grpo.data.splits import HELD_OUT
from visual_grpo.evaluation import report
from visual_grpo.operations.candidates import ComparedModel, judge_differences
from visual_grpo.operations.promotion import (
    NotPromotedError,
    check_number_of_gates,
    earlier_stages,
    find_candidate,
    find_references,
    judge_stages,
    refusal,
    samples_folder,
)
from visual_grpo.starter.world_defaults import default_parameters
from visual_grpo.tracking.registry import Registry, gate_settings
from visual_grpo.training import made_with


def create_pipeline() -> Pipeline:
    return Pipeline(
        [
            Node(
                judge,
                ["parameters", "records", "path:adapters", "path:promotion", "path:judgement", "draft"],
                ["promotion", "judgement"],
                name="judge_candidate",
            ),
            Node(
                promote,
                ["parameters", "path:adapters", "promotion", "judgement"],
                "promotion_result",
                name="promote_candidate",
            ),
            Node(require_promotion, "promotion_result", None, name="require_promotion"),
        ],
        tags=["model", "parameters_of.promotion.candidate"],
    )


def judge(
    parameters: Parameters,
    records: RecordTable,
    latest: Path,
    earlier_promotion: Path,
    earlier_judgement: Path,
    draft: Path,
) -> tuple[Path, dict[str, Any]]:
    """Generates with all models and returns their folder with the report, and the gate's decision.

    Nothing is generated if the candidate is already the champion: the earlier report is kept. The parameters come from
    the candidate's training.
    """
    settings = parameters.promotion
    registry = Registry.of(settings, parameters.output)
    candidate, champion = find_candidate(settings.candidate, latest, parameters), registry.champion()
    weights = weights_digest(candidate.adapters)
    present = {"parameters": parameters.public(), **provenance.code(parameters), **made_with.weights(parameters)}
    if changed := judge_differences(candidate, present):
        raise UserError(
            f"promote: the rewards that would judge {candidate.name} differ from those that it was trained with"
            f" ({'; '.join(changed)}). Restore the code and leave such parameters out, or train again."
        )
    known: dict[str, Any] = {
        "candidate": {"name": candidate.name, "digest": weights, "run_id": candidate.facts.get("mlflow_run_id")},
        "champion": None if champion is None else {"version": champion.version, "digest": champion.weights},
        "promoted": False,
        "already": False,
        "stages": {},
    }
    if champion is not None and champion.weights == weights:
        sentence = f"{candidate.name} is already the champion, version {champion.version} of {registry.name}."
        stages = earlier_stages(earlier_promotion, earlier_judgement, weights, draft)
        return draft, known | {"promoted": True, "already": True, "sentence": sentence, "stages": stages}
    references = find_references(candidate, champion, parameters)
    if reason := refusal(settings, registry, candidate, references):
        return draft, known | {"sentence": f"Not promoted: {candidate.name} {reason}"}
    excluding = weights, gate_settings(settings, parameters.evaluation)
    check_number_of_gates(settings.gates_per_year, registry, excluding)
    history = report.read_history(candidate.adapters)  # The report needs it, hours from now.
    stages = judge_stages(parameters, records, candidate, references, draft)
    _write_report(parameters, candidate, stages, draft, next(iter(references)), history)
    last = list(stages.values())[-1]  # It is reached only if the earlier stages hold.
    return draft, known | {"promoted": last["promoted"], "sentence": last["sentence"], "stages": stages}


def _write_report(
    parameters: Parameters,
    candidate: ComparedModel,
    stages: Mapping[str, Any],
    folder: Path,
    reference: str,
    history: pd.DataFrame,
) -> None:
    """Writes the report of the candidate against the champion, or against the base model where there is none."""
    before, after = (samples_folder(folder, HELD_OUT, name) for name in (reference, "candidate"))
    evaluation = report.evaluate(
        before,
        after,
        parameters.evaluation,
        candidate.facts,
        names=(f"the {reference}", candidate.name),
        gate=stages,
        adapter=f"{candidate.name} against the {reference}",
        parameters=parameters.public(),  # The training's parameters, with those of this promotion.
    )
    report.write_report(folder, evaluation, before, after, history, defaults=default_parameters())


def promote(parameters: Parameters, latest: Path, promotion: Path, judgement: dict[str, Any]) -> dict[str, Any]:
    """Registers what was judged better as a version and moves the alias to it, last; returns what became of it."""
    settings, weights = parameters.promotion, judgement["candidate"]["digest"]
    registry = Registry.of(settings, parameters.output)
    adapters = find_candidate(settings.candidate, latest, parameters).adapters
    champion, judged_against = registry.champion(), judgement["champion"]
    now = None if champion is None else champion.weights
    # After a crash, the candidate may be champion already.
    if weights_digest(adapters) != weights or now not in (judged_against and judged_against["digest"], weights):
        raise UserError(
            "promote: candidate or champion has changed since the judgement. Judge again.", remedy="promote"
        )
    # First, for it may fail: once the alias has moved, the gate is not repeated.
    registry.keep_report(adapters, promotion)
    sentences = [judgement["sentence"]]
    sentences += [f"Note: {note}" for stage in judgement["stages"].values() for note in stage["notes"]]
    version = judged_against["version"] if judgement["already"] else None
    if judgement["promoted"] and not judgement["already"]:
        stages = {"gate.stages": ", ".join(judgement["stages"])}
        version = registry.register(adapters, sentences, stages).version
        registry.promote(version)
    # What is noted need not be judged again, so this comes last; also of a champion, where a kill left it undone.
    if not judgement["already"] or not registry.is_judged(weights):
        refused = not (judgement["promoted"] or judgement["stages"])
        registry.note_gate(weights, gate_settings(settings, parameters.evaluation), refused=refused)
    for line in sentences if judgement["promoted"] else sentences[1:]:
        console.note(line)
    if version is not None:
        console.note(f"models:/{registry.name}@{registry.alias} is version {version} now.")
    return judgement | {"model": registry.name, "alias": registry.alias, "version": version}


def require_promotion(promotion_result: dict[str, Any]) -> None:
    """Raises NotPromotedError, so that a script can tell the outcome by the exit code."""
    if not promotion_result["promoted"]:
        raise NotPromotedError(str(promotion_result["sentence"]))
