"""Which parameters decide what a pipeline of the data flow leaves.

A new parameter decides everything until it is named here, or a reward declares it as its `transport`: a result that is
made again for nothing costs time, one that is kept in spite of a change is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from visual_grpo.config import flatten

NEVER = (
    *("resume", "output", "generate", "score", "compare", "reward_report", "tracking", "starter"),
    *("vote", "promotion", "retrain", "run", "reproduce", "plan", "gpu_check", "evaluation.redraw"),
)
"""Where and how results are written, and what other pipelines do. Of the starter its report speaks."""
_OF_TRAINING = (
    *("seed", "train", "grpo", "alarm", "distributed", "evaluation.every", "evaluation.prompts", "evaluation.adapter"),
    *(f"modules.*.{name}" for name in ("prompts_per_step", "group_size", "updates_per_rollout", "micro_batch_size")),
    "modules.*.advantage_epsilon",
    *(f"modules.*.{name}" for name in ("learning_rate", "clip_low", "clip_high", "kl_weight", "kl_correction")),
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


Pattern = list[str]
"""The parts of a dotted name; ``*`` is any."""


def decides(pipeline: str, name: str) -> bool:
    """Whether a parameter, or a section, by its dotted name decides what ``pipeline`` leaves.

    What rewards declare is not looked at: `decisive` does.
    """
    return not _is_left_out(name.split("."), _patterns((*NEVER, *NOT_READ[pipeline])))


def decisive(pipeline: str, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a parameter tree that have a value, by their dotted names."""
    patterns = _left_out(pipeline, tree)
    # A section of which nothing decides may be there or not.
    return {
        name: value
        for name, value in flatten(tree).items()
        if value not in (None, {}) and not _is_left_out(name.split("."), patterns)
    }


def decisive_keys(pipeline: str, tree: Mapping[str, Any]) -> list[str]:
    """The sections of ``tree`` that decide as a whole, and the keys of those that do in part."""
    return list(_keys(tree, "", _left_out(pipeline, tree)))


def transport_parameters(tree: Mapping[str, Any]) -> list[str]:
    """Dotted names of the options that the tree's rewards declare as their transport, whether they are set or not."""
    from visual_grpo.rewards.catalogue import transport_of  # Torch, which `kedro --help` should not pay.

    rewards = {name: reward for name, reward in (tree.get("rewards") or {}).items() if isinstance(reward, Mapping)}
    return [
        f"rewards.{name}.options.{option}"
        for name, reward in rewards.items()
        for option in sorted(transport_of(name, reward.get("function")))
    ]


def _keys(tree: Mapping[str, Any], above: str, patterns: Sequence[Pattern]) -> Iterator[str]:
    for key, value in tree.items():
        name = f"{above}{key}"
        parts = name.split(".")
        if _is_left_out(parts, patterns):
            continue
        in_part = any(len(pattern) > len(parts) and _agree(pattern, parts) for pattern in patterns)
        if in_part and isinstance(value, Mapping):
            yield from _keys(value, f"{name}.", patterns)
        else:
            yield name


def _left_out(pipeline: str, tree: Mapping[str, Any]) -> list[Pattern]:
    return _patterns((*NEVER, *NOT_READ[pipeline], *transport_parameters(tree)))


def _patterns(names: Iterable[str]) -> list[Pattern]:
    return [name.split(".") for name in names]


def _is_left_out(parts: Pattern, patterns: Sequence[Pattern]) -> bool:
    return any(len(pattern) <= len(parts) and _agree(pattern, parts) for pattern in patterns)


def _agree(pattern: Pattern, parts: Pattern) -> bool:
    """As far as both go."""
    return all(fnmatchcase(part, wanted) for wanted, part in zip(pattern, parts, strict=False))
