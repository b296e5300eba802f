"""The optimiser loop shared by all pretrainings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from visual_grpo.hardware.parallel import map_on_cores

Loss = Callable[[], Tensor]
"""Computes a loss, a scalar with gradient."""
Report = Callable[[int], None]
"""Called with the number of completed steps."""

_FINAL_SHARE = 0.03
"""Final learning rate as a share of its peak."""


def minimise(
    loss_of_step: Loss,
    parameters: Iterable[nn.Parameter],
    *,
    steps: int,
    peak_learning_rate: float,
    warmup: int,
    report: Report,
) -> None:
    """Runs AdamW with linear warm-up and linear decay, gradients clipped to norm 1."""

    def add_gradients() -> None:
        loss_of_step().backward()

    _descend(add_gradients, list(parameters), steps, peak_learning_rate, warmup, report)


def minimise_in_parts(
    losses_of_step: Callable[[], Sequence[Loss]],
    parameters: Iterable[nn.Parameter],
    *,
    steps: int,
    peak_learning_rate: float,
    warmup: int,
    report: Report,
) -> None:
    """As `minimise`, of the sum of several losses, each computed on a core of its own.

    Their gradients are added in their order: the number of cores changes nothing.
    """
    parameters = list(parameters)

    def gradients_of(loss: Loss) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(loss(), parameters, allow_unused=True)

    def add_gradients() -> None:
        shares = map_on_cores(gradients_of, losses_of_step(), parameters[0].device, gradient=True)
        for parameter, *own in zip(parameters, *shares, strict=True):
            there = [share for share in own if share is not None]
            if there:  # Laid out as the parameter, which a share need not be: AdamW is slow otherwise.
                parameter.grad = torch.zeros_like(parameter)
            for share in there:
                parameter.grad += share

    _descend(add_gradients, parameters, steps, peak_learning_rate, warmup, report)


def _descend(
    add_gradients: Callable[[], None],
    parameters: list[nn.Parameter],
    steps: int,
    peak_learning_rate: float,
    warmup: int,
    report: Report,
) -> None:
    # One kernel for each parameter: on a CPU a quarter of the time of the loop that is the default.
    optimizer = torch.optim.AdamW(parameters, peak_learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = peak_learning_rate * _schedule(step, steps, min(warmup, steps))
        optimizer.zero_grad()
        add_gradients()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        report(step + 1)


def _schedule(step: int, steps: int, warmup: int) -> float:
    rising = (step + 1) / max(warmup, 1)
    falling = 1 - (1 - _FINAL_SHARE) * step / steps
    return min(rising, 1.0) * falling
