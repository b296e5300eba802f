"""Networks of which each card keeps a part (`hardware.shards`): what that saves, and what is gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from visual_grpo.hardware.shards import layers_of

_WHOLE = 2
"""Copies of a layer while it is gathered: as the parts arrive, and as it is computed with."""


class Parts:
    """Of the frozen ``networks`` on one of ``count`` cards."""

    def __init__(self, networks: Iterable[nn.Module], count: int) -> None:
        self._count = count
        self._bytes = {layer: _frozen(layer) for network in networks for layer in layers_of(network)}

    @property
    def saved(self) -> int:
        """Bytes that need not be on the card, beside one layer that is whole."""
        there = sum(self._bytes.values())
        return there - there // self._count - _WHOLE * max(self._bytes.values(), default=0)

    def tell(self, gathered: Callable[[float], None]) -> None:
        """Calls ``gathered`` with the bytes that come from the other cards, at every layer, forward and backward."""
        for layer, size in self._bytes.items():
            coming = size * (self._count - 1) / self._count
            layer.register_forward_pre_hook(lambda *_, coming=coming: _if_forward(gathered, coming))
            layer.register_forward_hook(lambda _, __, output, coming=coming: _at_backward(output, gathered, coming))


def _if_forward(gathered: Callable[[float], None], coming: float) -> None:
    """A checkpoint that is computed again in a backward pass finds the layer there."""
    if torch._C._current_graph_task_id() == -1:
        gathered(coming)


def _at_backward(output: Any, gathered: Callable[[float], None], coming: float) -> None:
    first = output[0] if isinstance(output, tuple) else output
    if isinstance(first, Tensor) and first.requires_grad:
        first.register_hook(lambda gradient: gathered(coming))


def _frozen(layer: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in layer.parameters() if not parameter.requires_grad)
