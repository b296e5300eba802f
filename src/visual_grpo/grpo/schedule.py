"""Learning-rate schedules as a function of the update's number: nothing to save or restore."""

from __future__ import annotations

import math
from typing import Literal

Kind = Literal["constant", "linear", "cosine"]


def learning_rate_factor(update: int, total: int, warmup: int, kind: Kind) -> float:
    """Factor on the peak learning rate for ``update`` (0-based) of ``total``.

    Linear from 1/warmup to 1 over ``warmup`` updates, then constant, or falling to 0 at ``total``.
    """
    if update < warmup:
        return (update + 1) / warmup
    progress = min((update - warmup) / max(total - warmup, 1), 1.0)
    if kind == "linear":
        return 1 - progress
    if kind == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1.0
