"""A replay whose chunks come from several processes, and the backward pass that goes on in each of them.

Shapes: b rows of a part, s steps of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from visual_grpo.hardware import shards
from visual_grpo.sharing.workers import Remote, Workers
from visual_grpo.types import ReplayChunk


class Stream(Protocol):
    """The chunks of one part's replay."""

    @property
    def other(self) -> Remote | None:
        """The process that computes them; None = this one."""
        ...

    def ask(self) -> None: ...

    def compute(self) -> None:
        """What is computed in this process, while the others do what they were asked for."""
        ...

    def chunk(self) -> ReplayChunk | None:
        """What was asked for; None after the last one."""
        ...


class Here:
    """The first process's own share."""

    other = None

    def __init__(self, chunks: Iterator[ReplayChunk]) -> None:
        self._chunks = chunks
        self._chunk: ReplayChunk | None = None

    def ask(self) -> None:
        """The others first: they compute while this one does."""

    def compute(self) -> None:
        self._chunk = next(self._chunks, None)

    def chunk(self) -> ReplayChunk | None:
        return self._chunk


class There:
    """The share of another process."""

    def __init__(self, other: Remote, module: str, name: str, rows: Tensor) -> None:
        self.other, self._name, self._request = other, name, 0
        other.tell("replay", module=module, name=name, rows=rows)

    def ask(self) -> None:
        self._request = self.other.ask("next_chunk", name=self._name)

    def compute(self) -> None:
        """Is done elsewhere."""

    def chunk(self) -> ReplayChunk | None:
        got = self.other.answer(self._request)
        if got is None:
            return None
        first, last, log_probs, kl = got
        asked = torch.ones((), requires_grad=True)  # So that the values have a gradient.
        values = _Values.apply(asked, log_probs, kl, self.other, self._name)
        log_probs, kl = values if kl is not None else (values, None)
        return ReplayChunk(steps=slice(first, last), log_probs=log_probs, kl=kl)


class _Values(torch.autograd.Function):
    """A chunk of another process, in which the backward pass goes on.

    Autograd takes the youngest first: the other processes begin before this one does its own share.
    """

    @staticmethod
    def forward(
        ctx: Any, asked: Tensor, log_probs: Tensor, kl: Tensor | None, other: Remote, name: str
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.other, ctx.name = other, name
        return log_probs.clone() if kl is None else (log_probs.clone(), kl.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        log_probs, kl = gradients if len(gradients) == 2 else (gradients[0], None)
        ctx.other.tell("backward", name=ctx.name, log_probs=log_probs, kl=kl)
        return (None,) * 5


class Together(torch.autograd.Function):
    """A chunk of all processes, each of which has a part of the model only: its backward pass needs all of them.

    Younger than what it joins, it comes first: those that have no share of the chunk lend, and this process does once
    its backward pass is over.
    """

    @staticmethod
    def forward(ctx: Any, log_probs: Tensor, workers: Workers, streams: Sequence[Stream]) -> Tensor:
        ctx.workers, ctx.idle = workers, set(workers.others) - {stream.other for stream in streams}
        return log_probs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.workers.have_lent(ctx.idle)
        torch.autograd.Variable._execution_engine.queue_callback(shards.lend)
        return gradients[0], None, None
