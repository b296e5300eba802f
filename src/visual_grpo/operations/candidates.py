"""Adapters that are compared or promoted, and in what their rewards differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visual_grpo.common.errors import counted
from visual_grpo.config import Parameters
from visual_grpo.config.adapter_folder import CODE, COMMIT, FILE, NONE, modules_of, read_facts
from visual_grpo.config.defaults import pinned
from visual_grpo.rewards.catalogue import reward_digests
from visual_grpo.tracking.model_ref import find_adapters

_NOT_SCORED = ("weight", "max_failed_share")
"""Parameters of a reward that change nothing in a score; weights are compared as the modules have them."""


@dataclass(frozen=True)
class Side:
    """A training's adapters, or the base model."""

    name: str
    folder: Path | None
    facts: dict[str, Any]
    """``training.json`` of the training; empty for the base model."""


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


def gate_settings(parameters: Parameters) -> str:
    """64 hex digits: the same for parameters with which a gate comes to the same decision."""
    promotion = parameters.promotion.model_dump(mode="json", exclude={"candidate", "model", "alias", "base_copy_mb"})
    drawn = parameters.evaluation.model_dump(mode="json", include={"seed", "images_per_prompt"})
    return hashlib.sha256(json.dumps([promotion, drawn], sort_keys=True).encode()).hexdigest()


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
    assert side.folder is not None
    weights = config.weights(modules_of(side.folder))
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
