"""Which parameters decide what a pipeline of the data flow leaves.

A new parameter decides everything until it is named here: a result that is made again for nothing costs time, one that
is kept in spite of a change is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from visual_grpo.config import flatten

NEVER = (
    *("resume", "output", "generate", "score", "compare", "reward_report", "tracking", "starter"),
    *("vote", "promotion", "retrain", "run", "reproduce", "evaluation.redraw"),
)
"""Where and how results are written, and what other pipelines do. Of the starter its report speaks."""
_OF_TRAINING = (
    *("seed", "train", "grpo", "alarm", "distributed", "evaluation.every", "evaluation.prompts", "evaluation.adapter"),
    *(f"modules.*.{name}" for name in ("prompts_per_step", "group_size", "updates_per_rollout", "micro_batch_size")),
    *(f"modules.*.{name}" for name in ("learning_rate", "clip_low", "clip_high", "kl_weight", "advantage_epsilon")),
)
NOT_READ = {
    "baseline": (*_OF_TRAINING, "evaluation.bootstrap_samples"),
    "train": (
        "adapter",
        # Of the baseline, which the training waits for.
        *(f"evaluation.{name}" for name in ("images_per_prompt", "max_prompts", "controls", "bootstrap_samples")),
    ),
    "evaluate": _OF_TRAINING,
}
"""Of the pipelines that take the whole tree: parameters, or whole sections, that change nothing for them."""


def decides(pipeline: str, name: str) -> bool:
    """Whether a parameter, or a section, by its dotted name decides what ``pipeline`` leaves."""
    parts = name.split(".")
    return not any(len(left_out) <= len(parts) and _agree(left_out, parts) for left_out in _left_out(pipeline))


def decisive(pipeline: str, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a parameter tree that have a value, by their dotted names."""
    flat = flatten(tree)
    # A section of which nothing decides may be there or not.
    return {name: value for name, value in flat.items() if value not in (None, {}) and decides(pipeline, name)}


def decisive_keys(pipeline: str, tree: Mapping[str, Any]) -> list[str]:
    """The sections of ``tree`` that decide as a whole, and the keys of those that do in part."""
    return list(_keys(pipeline, tree, ""))


def _keys(pipeline: str, tree: Mapping[str, Any], above: str) -> Iterator[str]:
    for key, value in tree.items():
        name = f"{above}{key}"
        if not decides(pipeline, name):
            continue
        parts = name.split(".")
        in_part = any(len(left_out) > len(parts) and _agree(left_out, parts) for left_out in _left_out(pipeline))
        if in_part and isinstance(value, Mapping):
            yield from _keys(pipeline, value, f"{name}.")
        else:
            yield name


def _left_out(pipeline: str) -> Iterator[list[str]]:
    """The parts of each dotted name; ``*`` is any."""
    return (name.split(".") for name in (*NEVER, *NOT_READ[pipeline]))


def _agree(pattern: list[str], parts: list[str]) -> bool:
    """As far as both go."""
    return all(fnmatchcase(part, wanted) for wanted, part in zip(pattern, parts, strict=False))
