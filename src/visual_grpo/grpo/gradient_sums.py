"""Adds up the gradients of chunks, micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    def reduce(self, total: Callable[[Tensor], object]) -> None:
        """Replaces each sum by that over all ranks; ``total`` adds a flat tensor up in place."""
        own = [self._sums.get(parameter, parameter.grad) for parameter in self._parameters]
        like = [parameter.double() if in_double(parameter) else parameter for parameter in self._parameters]
        parts = [torch.zeros_like(p).detach() if g is None else g for p, g in zip(like, own, strict=True)]
        there = parts[0].new_tensor([gradient is not None for gradient in own])
        flat = torch.cat([part.flatten() for part in (*parts, there)])
        total(flat)
        *sums, there = flat.split([part.numel() for part in (*parts, there)])
        for parameter, part, count in zip(self._parameters, sums, there, strict=True):
            if not count:  # No gradient reaches it: then the optimiser must not touch it.
                continue
            if in_double(parameter):
                self._sums[parameter] = part.view_as(parameter)
            else:
                parameter.grad = part.view_as(parameter)

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
