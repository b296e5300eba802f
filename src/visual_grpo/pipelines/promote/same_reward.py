"""Whether two trainings aimed at the same thing, and whether the gate judges by what the candidate aimed at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from visual_grpo.config import Parameters
from visual_grpo.config.presets import pinned
from visual_grpo.pipelines.compare import Side
from visual_grpo.rewards.catalogue import reward_digests
from visual_grpo.trained_adapters import CODE, COMMIT, FILE, modules_of

_OTHERWISE = ("weight", "max_failed_share")
"""Parameters of a reward that change nothing in a score; weights are compared as the modules have them."""


def reward_differences(champion: Side, candidate: Side) -> list[str]:
    """In what the rewards of two trainings differ, such as ``weight of ocr: 1, now -1``; empty if they are the same."""
    return _differences(_of_training(champion), _of_training(candidate))


def judge_differences(candidate: Side, present: Parameters) -> list[str]:
    """In what the rewards that judge now differ from those of the candidate's training: parameters, or edited code
    or files, other weights."""
    now = _rewards(present, _modules(candidate)) | reward_digests(present.rewards, present.output)
    return _differences(_of_training(candidate), now)


def _of_training(side: Side) -> dict[str, Any]:
    config = Parameters.model_validate(pinned(side.facts["parameters"]))
    digests = {name: value for name, value in side.facts.items() if name.startswith((CODE, FILE, COMMIT))}
    return _rewards(config, _modules(side)) | digests


def _modules(side: Side) -> list[str]:
    assert side.folder is not None
    return modules_of(side.folder)


def _rewards(config: Parameters, modules: Sequence[str]) -> dict[str, Any]:
    """What each reward's value and its share in the total depend on, beside code and files."""
    tree = config.public()["rewards"]
    found: dict[str, Any] = {f"weight of {name}": weight for name, weight in config.weights(modules).items()}
    for name, reward in tree.items():
        found |= {f"{key} of {name}": value for key, value in reward.items() if key not in _OTHERWISE}
    return found


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    return [f"{name}: {_shown(before.get(name))}, now {_shown(now.get(name))}" for name in names]


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    text = "none" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:12]}..."
