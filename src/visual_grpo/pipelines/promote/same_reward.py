"""Whether two trainings aimed at the same thing."""

from __future__ import annotations

from typing import Any

from visual_grpo.config import Parameters
from visual_grpo.config.presets import pinned
from visual_grpo.pipelines.compare.sides import Side
from visual_grpo.trained_adapters import CODE, modules_of


def reward_differences(champion: Side, candidate: Side) -> list[str]:
    """In what the rewards of two trainings differ, such as ``weight of ocr: 1, now -1``; empty if they are the same."""
    before, now = _rewards(champion), _rewards(candidate)
    return [
        f"{name}: {_shown(before.get(name))}, now {_shown(now.get(name))}"
        for name in sorted(before | now)
        if before.get(name) != now.get(name)
    ]


def _rewards(side: Side) -> dict[str, Any]:
    """What each reward's value and share in the total depend on."""
    assert side.folder is not None
    config = Parameters.model_validate(pinned(side.facts["parameters"]))
    found: dict[str, Any] = {f"weight of {name}": w for name, w in config.weights(modules_of(side.folder)).items()}
    for name, reward in config.rewards.items():
        found |= {f"function of {name}": reward.function, f"options of {name}": reward.options}
    return found | {name: value for name, value in side.facts.items() if name.startswith(CODE)}


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    text = "none" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:12]}..."
