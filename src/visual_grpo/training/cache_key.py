"""Parameters that decide the results of a pipeline of the data flow.

A new parameter decides everything until it is named here, or a reward declares it as its `transport`: a result that is
made again for nothing costs time, one that is kept in spite of a change is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from visual_grpo.config import flatten
from visual_grpo.config.pipelines import BESIDE_FLOW
from visual_grpo.rewards.catalogue import transport_of

NEVER = ("resume", "output", "tracking", "starter", "evaluation.redraw", *BESIDE_FLOW)
"""Where and how results are written, and what other pipelines do. The starter's report stands for its section."""
_OF_TRAINING = (
    *("seed", "train", "grpo", "alarm", "distributed", "evaluation.every", "evaluation.prompts", "evaluation.adapter"),
    *(f"modules.*.{name}" for name in ("prompts_per_step", "group_size", "updates_per_rollout", "micro_batch_size")),
    "modules.*.advantage_epsilon",
    *(f"modules.*.{name}" for name in ("learning_rate", "clip_low", "clip_high", "kl_weight")),
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
"""Pipeline that takes the whole tree -> parameters, or whole sections, that change nothing for it."""


def cache_key(pipeline: str, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters that decide results and have a value, by their dotted names."""
    patterns = [name.split(".") for name in (*NEVER, *NOT_READ[pipeline], *transport_parameters(tree))]
    # A section of which nothing decides may be there or not.
    return {
        name: value
        for name, value in flatten(tree).items()
        if value not in (None, {}) and not any(_begins(name.split("."), pattern) for pattern in patterns)
    }


def transport_parameters(tree: Mapping[str, Any]) -> list[str]:
    """Dotted names of the options that the tree's rewards declare as their transport, whether they are set or not."""
    return [
        f"rewards.{name}.options.{option}"
        for name, reward in (tree.get("rewards") or {}).items()
        if isinstance(reward, Mapping)
        for option in sorted(transport_of(name, reward.get("function")))
    ]


def _begins(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    pairs = zip(parts, pattern, strict=False)
    return len(pattern) <= len(parts) and all(fnmatchcase(part, wanted) for part, wanted in pairs)
