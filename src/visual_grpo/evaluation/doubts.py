"""Reasons not to believe a difference although its interval excludes 0."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from visual_grpo.records.split import FEW_PROMPTS

GUARDS = ("edge_density", "colour_entropy")
"""Scores that fall where a policy wins its reward with ever emptier pictures; guards where they are not optimised."""
MOST_FALL = 0.25
"""Share of the base's mean by which a guard may fall before a gain is doubted."""
FEW_NOTE = f"Fewer than {FEW_PROMPTS} independent prompts are too few to rely on the interval."

Entry = Mapping[str, Any]
"""What `compare.compare` says of one score, split and sampler."""


def doubts(entry: Entry, beside: Iterable[Entry] = ()) -> list[str]:
    """Reasons to doubt the difference of ``entry``, none where it is no difference or a sound one.

    Args:
        beside: the other scores of the same samples, of which guards are looked at.
    """
    if not excludes_zero(entry):
        return []
    found = [FEW_NOTE[:1].lower() + FEW_NOTE[1:-1]] if entry["units"] < FEW_PROMPTS else []
    if entry["ci_low"] > 0:
        found += [_unscored(entry)] if more_unscored(entry) else []
        found += [_how_far(guard) for guard in guards(beside) if _collapsed(guard)]
    return found


def excludes_zero(entry: Entry) -> bool:
    """Whether there is an interval, without 0 in it."""
    return entry["ci_low"] is not None and not entry["ci_low"] <= 0 <= entry["ci_high"]


def more_unscored(entry: Entry) -> bool:
    """Whether significantly more of the trained model's samples could not be scored."""
    return entry["unscored_differs"] and entry["unscored_trained"] > entry["unscored_baseline"]


def fallen(beside: Iterable[Entry]) -> list[Entry]:
    """The guards whose interval lies below 0."""
    return [guard for guard in guards(beside) if _fell(guard)]


def guards(entries: Iterable[Entry]) -> list[Entry]:
    """The scores that guard, and are not optimised themselves."""
    return [entry for entry in entries if entry["name"] in GUARDS and not entry["optimised"]]


def _fell(guard: Entry) -> bool:
    return guard["ci_high"] is not None and guard["ci_high"] < 0


def _collapsed(guard: Entry) -> bool:
    """Whether it fell, and by how much. A few pictures have most of the edges, so that the interval alone is wide."""
    return _fell(guard) and guard["difference"] < -MOST_FALL * guard["baseline_mean"]


def _unscored(entry: Entry) -> str:
    counts = f"{entry['unscored_trained']} of its {entry['samples']} samples could not be scored"
    return f"{counts} (base: {entry['unscored_baseline']}), and the means are of the rest"


def _how_far(guard: Entry) -> str:
    means = f"from {guard['baseline_mean']:.3g} to {guard['trained_mean']:.3g}"
    return f"its pictures are emptier, {guard['name']} fell {means}"
