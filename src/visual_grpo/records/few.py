"""Splits of a few records: by chance nothing may be left to train on, or nothing to evaluate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from visual_grpo.records.split import SPLITS, Splitter

MOST = 200
"""Of more records the default shares leave no split empty: 0.9 to the power of 200 is 1e-9."""

Shares = tuple[float, float]
"""data.eval_share and data.held_out_share."""

_STEPS = tuple(step / 20 for step in range(13))


def split_counts(keys: Sequence[tuple[str, str]], shares: Shares) -> Counter[str]:
    """How many records each split gets; ``keys`` are of each record its id and its group key."""
    splitter = Splitter(eval_share=shares[0], held_out_share=shares[1])
    return Counter(splitter(record_id, shared) for record_id, shared in keys)


def is_enough(counts: Counter[str]) -> bool:
    """Whether there is a record to train on and one to evaluate."""
    return counts["train"] > 0 and counts["eval"] + counts["held_out"] > 0


def shares_that_do(keys: Sequence[tuple[str, str]], shares: Shares) -> Shares | None:
    """The nearest shares that leave no split empty, else the nearest that are enough; None if there are none."""
    grid = [(own, held) for own in _STEPS for held in _STEPS if own + held < 1]
    nearest = sorted(grid, key=lambda pair: abs(pair[0] - shares[0]) + abs(pair[1] - shares[1]))
    for accepts in (lambda counts: all(counts[split] for split in SPLITS), is_enough):
        found = next((pair for pair in nearest if accepts(split_counts(keys, pair))), None)
        if found is not None:
            return found
    return None
