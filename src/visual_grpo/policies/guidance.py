"""Classifier-free guidance (arXiv 2207.12598)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def guided(
    conditional: Tensor, unconditional: Callable[[], Tensor], scale: float, *, both_branches: bool = False
) -> Tensor:
    """The velocity that is ``scale`` times as far from the unconditional one; 1 = off.

    The unconditional branch runs without gradient: guidance weighs it with a constant, and its gradient would train
    what inference only pushes away from. ``both_branches`` trains through it all the same.
    """
    if scale <= 1:
        return conditional
    with torch.set_grad_enabled(torch.is_grad_enabled() and both_branches):
        away_from = unconditional()
    return away_from + scale * (conditional - away_from)
