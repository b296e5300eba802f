"""What the processes of the tests train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.toys import ToyGaussianPolicy, ToyTokenPolicy
from visual_grpo.errors import UserError
from visual_grpo.hardware import shards
from visual_grpo.policies.seeds import draw_seeds
from visual_grpo.sharing.worker import Trained
from visual_grpo.types import PromptRecord, ReplayChunk, Rollout


class SeededTokens(ToyTokenPolicy):
    """Each row is a function of its seed, as a real policy's is.

    The table is not zero: where a gradient is exactly 0, AdamW makes steps of what rounding leaves of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table.data = 0.3 * torch.randn(self.table.shape, generator=torch.Generator().manual_seed(8))

    def rollout(self, prompts: Sequence[PromptRecord], group_size: int, generator: torch.Generator) -> Rollout[Tensor]:
        rollout = super().rollout(prompts, group_size, generator)
        rows = float(len(rollout.samples))
        return replace(rollout, stats={"entropy": rows, "seconds/tokens": 1.0, "speed/tokens_per_second": 2.0})

    def draw(self, log_probs: Tensor, rows: int, generator: torch.Generator) -> Tensor:
        own = [torch.Generator().manual_seed(seed) for seed in draw_seeds(rows, generator)]
        return torch.stack([torch.multinomial(log_probs.exp(), 1, generator=each)[:, 0] for each in own])


class SeededSteps(ToyGaussianPolicy):
    def noise(self, rows: int, generator: torch.Generator) -> Tensor:
        own = [torch.Generator().manual_seed(seed) for seed in draw_seeds(rows, generator)]
        return torch.stack([torch.randn(len(self.table), generator=each) for each in own])


class Unpackable(SeededTokens):
    """Its rollouts hold what cannot be sent."""

    def rollout(self, prompts: Sequence[PromptRecord], group_size: int, generator: torch.Generator) -> Rollout[Any]:
        rollout: Rollout[Any] = super().rollout(prompts, group_size, generator)
        return replace(rollout, trajectory=object())


class Failing(SeededTokens):
    """Its second rollout, or its second replay, fails; in the other processes alone."""

    def __init__(self, where: str = "") -> None:
        super().__init__()
        self.where, self.calls = where, 0

    def rollout(self, prompts: Sequence[PromptRecord], group_size: int, generator: torch.Generator) -> Rollout[Tensor]:
        self._fail_at("rollout")
        return super().rollout(prompts, group_size, generator)

    def replay(self, trajectory: Tensor, rows: Tensor) -> Iterator[ReplayChunk]:
        self._fail_at("replay")
        return super().replay(trajectory, rows)

    def _fail_at(self, where: str) -> None:
        self.calls += where in self.where
        if self.calls > 1:
            if "memory" in self.where:
                raise MemoryError("no more")
            if "user" in self.where:
                raise UserError("the disk is full")
            raise ZeroDivisionError("a bug")


class LayeredTokens(SeededTokens):
    """What it learns goes through frozen layers. How often it calls them, forward and backward, depends on its rows, as
    with real prompts: the calls beside the first change nothing."""

    is_cut = True

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.network = nn.ModuleDict({"layers": self.layers})
        given = torch.Generator().manual_seed(2)
        for parameter in self.network.requires_grad_(False).parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=given)
        if self.is_cut and shards.active():
            shards.cut({"network": self.network}, torch.device("cpu"))

    def rollout(self, prompts: Sequence[PromptRecord], group_size: int, generator: torch.Generator) -> Rollout[Tensor]:
        with self._layered(len(prompts)):
            return super().rollout(prompts, group_size, generator)

    def replay(self, trajectory: Tensor, rows: Tensor) -> Iterator[ReplayChunk]:
        with self._layered(int(trajectory[rows].sum()) % 3):
            yield from super().replay(trajectory, rows)

    @contextmanager
    def _layered(self, more: int) -> Iterator[None]:
        own, self.table = self.table, self._through_layers() + 0.0 * sum(self._through_layers() for _ in range(more))
        try:
            yield
        finally:
            self.table = own

    def _through_layers(self) -> Any:
        value: Tensor = self.table
        for layer in self.layers:
            value = value + layer(value).tanh()
        return value


class LayeredWhole(LayeredTokens):
    """Also where others are cut."""

    is_cut = False


KINDS = {kind.__name__: kind for kind in (SeededTokens, SeededSteps, LayeredTokens, Failing, Unpackable)}


def toys(kind: str, where: str = "", device: str = "cpu") -> Trained:
    if where == "build":
        raise UserError("no such model")
    return Trained(policies={"toy": Failing(where) if kind == "Failing" else KINDS[kind]()})
