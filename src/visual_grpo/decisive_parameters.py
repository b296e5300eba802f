"""Which parameters decide what a pipeline of the data flow leaves.

A new parameter decides everything until it is named here: a result that is made again for nothing costs time, one that
is kept in spite of a change is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from visual_grpo.config import flatten

NEVER = (
    *("resume", "output", "generate", "score", "compare", "reward_report", "tracking", "starter"),
    *("vote", "promotion", "retrain", "run", "reproduce", "evaluation.redraw"),
)
"""Where and how results are written, and what other pipelines do. Of the starter its report speaks."""
NOT_READ = {
    "baseline": (
        "seed",
        "train",
        "grpo",
        "alarm",
        *(f"evaluation.{name}" for name in ("every", "prompts", "bootstrap_samples", "adapter")),
    ),
    "train": (
        "adapter",
        # Of the baseline, which the training waits for.
        *(f"evaluation.{name}" for name in ("images_per_prompt", "max_prompts", "controls", "bootstrap_samples")),
    ),
    "evaluate": ("seed", "train", "grpo", "alarm", *(f"evaluation.{name}" for name in ("every", "prompts", "adapter"))),
}
"""Of the pipelines that take the whole tree: parameters, or whole sections, that change nothing for them."""


def decides(pipeline: str, name: str) -> bool:
    """Whether a parameter, or a section, by its dotted name decides what ``pipeline`` leaves."""
    return not any(name == left_out or name.startswith(f"{left_out}.") for left_out in _left_out(pipeline))


def decisive(pipeline: str, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a parameter tree by their dotted names."""
    return {name: value for name, value in flatten(tree).items() if decides(pipeline, name)}


def decisive_keys(pipeline: str, tree: Mapping[str, Any]) -> list[str]:
    """The sections of ``tree`` that decide as a whole, and the keys of those that do in part."""
    keys: list[str] = []
    for section, value in tree.items():
        if any(name.startswith(f"{section}.") for name in _left_out(pipeline)) and isinstance(value, Mapping):
            keys += [name for name in (f"{section}.{key}" for key in value) if decides(pipeline, name)]
        elif decides(pipeline, section):
            keys.append(section)
    return keys


def _left_out(pipeline: str) -> tuple[str, ...]:
    return (*NEVER, *NOT_READ[pipeline])
