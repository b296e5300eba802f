"""The optimiser loop shared by all pretrainings."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

Report = Callable[[int], None]
"""Called with the number of completed steps."""

_FINAL_SHARE = 0.03
"""Final learning rate as a share of its peak."""


def minimise(
    loss_of_step: Callable[[], Tensor],
    parameters: Iterable[nn.Parameter],
    *,
    steps: int,
    peak_learning_rate: float,
    warmup: int,
    report: Report,
) -> None:
    """Runs AdamW with linear warm-up and linear decay, gradients clipped to norm 1."""
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, peak_learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = peak_learning_rate * _schedule(step, steps, min(warmup, steps))
        loss = loss_of_step()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        report(step + 1)


def _schedule(step: int, steps: int, warmup: int) -> float:
    rising = (step + 1) / max(warmup, 1)
    falling = 1 - (1 - _FINAL_SHARE) * step / steps
    return min(rising, 1.0) * falling
