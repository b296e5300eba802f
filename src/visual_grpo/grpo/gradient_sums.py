"""Adds up the gradients of chunks, micro-batches and processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn


class GradientSums:
    """From its making until it is closed, what backward passes leave for ``parameters``, added up.

    In float64 for those on a CPU: AdamW makes a whole step even of a gradient that nearly cancels, so that where one
    rounds would decide its direction, and another number of processes rounds elsewhere. On a GPU ``grad`` itself is the
    sum, in the parameter's precision: its memory is short, and its kernels do not repeat to the last bit anyway.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._take) for parameter in parameters if in_double(parameter)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Puts the sums, rounded once, into ``grad``; what comes later is as without this."""
        for hook in self._hooks:
            hook.remove()
        for parameter, total in self._sums.items():
            parameter.grad = total.to(parameter.dtype)
        self._sums.clear()

    def totals(self) -> list[Tensor | None]:
        """One for each parameter; None where no gradient has reached it."""
        return [self._sums.get(parameter, parameter.grad) for parameter in self._parameters]

    def add(self, others: Sequence[Tensor | None]) -> None:
        """``totals`` of another process."""
        for parameter, other in zip(self._parameters, others, strict=True):
            if other is None:
                continue
            if in_double(parameter):
                self._add(parameter, other)
            else:
                there = other.to(parameter)
                parameter.grad = there if parameter.grad is None else parameter.grad.add_(there)

    def _take(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self._add(parameter, parameter.grad)
        parameter.grad = None

    @torch.no_grad()
    def _add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        total = self._sums.get(parameter)
        if total is None:
            self._sums[parameter] = gradient.double()
        else:
            total.add_(gradient)


def in_double(parameter: nn.Parameter) -> bool:
    """Whether its gradients are added up in float64."""
    return parameter.device.type == "cpu"
