"""Splits of a few records: by chance nothing may be left to train on, or nothing to evaluate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from visual_grpo.records.split import OPEN, SPLITS, Splitter

MOST = 200
"""Of more records the default shares leave no split empty: 0.9 to the power of 200 is 1e-9."""

Shares = tuple[float, float, float]
"""data.eval_share, data.held_out_share and data.sealed_share."""

_STEPS = tuple(step / 20 for step in range(13))


def split_counts(keys: Sequence[tuple[str, str]], shares: Shares) -> Counter[str]:
    """How many records each split gets; ``keys`` are of each record its id and its group key."""
    splitter = Splitter(eval_share=shares[0], held_out_share=shares[1], sealed_share=shares[2])
    return Counter(splitter(record_id, shared) for record_id, shared in keys)


def is_enough(counts: Counter[str]) -> bool:
    """Whether there is a record to train on and one to evaluate."""
    return counts["train"] > 0 and counts["eval"] + counts["held_out"] > 0


def shares_that_do(keys: Sequence[tuple[str, str]], shares: Shares) -> Shares | None:
    """The nearest shares that leave no split empty, else the nearest that are enough; None if there are none.

    The sealed share stays as it is, or is 0 if no others do with it.
    """
    for sealed in dict.fromkeys((shares[2], 0.0)):
        wanted = SPLITS if sealed > 0 else OPEN
        grid = [(own, held, sealed) for own in _STEPS for held in _STEPS if own + held + sealed < 1]
        nearest = sorted(grid, key=lambda own: abs(own[0] - shares[0]) + abs(own[1] - shares[1]))
        counts = {own: split_counts(keys, own) for own in nearest}
        found = next((own for own in nearest if all(counts[own][split] for split in wanted)), None)
        found = found or next((own for own in nearest if is_enough(counts[own])), None)
        if found is not None:
            return found
    return None
