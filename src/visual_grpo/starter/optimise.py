"""The optimiser loop shared by all pretrainings."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

Report = Callable[[int], None]
"""Called with the number of completed steps."""

_FINAL_SHARE = 0.03
"""Final learning rate as a share of its peak."""
_LEAST_SIGMA = 0.002


def minimise(
    backward: Callable[[], None],
    parameters: Iterable[nn.Parameter],
    *,
    steps: int,
    peak_learning_rate: float,
    warmup: int,
    report: Report,
) -> None:
    """Runs AdamW with linear warm-up and linear decay, gradients clipped to norm 1.

    ``backward`` draws a batch and adds the gradients of its loss.
    """
    parameters, warmup = list(parameters), max(1, min(warmup, steps))
    # One kernel for each parameter: on a CPU a quarter of the time of the loop that is the default.
    optimizer = torch.optim.AdamW(parameters, peak_learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = peak_learning_rate * (min((step + 1) / warmup, 1.0) * (1 - (1 - _FINAL_SHARE) * step / steps))
        optimizer.zero_grad()
        backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        report(step + 1)


def random_sigma(count: int, generator: torch.Generator) -> Tensor:
    """[B, 1, 1, 1], uniform: a solver's error is an integral over sigma, so few sampling steps suffice."""
    return torch.rand(count, 1, 1, 1, generator=generator) * (1 - _LEAST_SIGMA) + _LEAST_SIGMA
