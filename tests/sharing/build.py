"""What the processes of the tests train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tests.toys import ToyGaussianPolicy, ToyTokenPolicy
from visual_grpo.errors import UserError
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
        rows = [record for record in prompts for _ in range(group_size)]
        log_probs = self.table.detach().log_softmax(-1)
        drawn = [
            torch.multinomial(log_probs.exp(), 1, generator=torch.Generator().manual_seed(seed))[:, 0]
            for seed in draw_seeds(len(rows), generator)
        ]
        tokens = torch.stack(drawn)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        mask[1::2, tokens.shape[1] // 2 :] = False
        chosen = log_probs.expand(len(tokens), -1, -1).gather(2, tokens[..., None])[..., 0]
        return Rollout(
            prompts=rows,
            samples=list(tokens),
            trajectory=tokens,
            log_probs=chosen,
            mask=mask,
            stats={"entropy": float(len(rows)), "seconds/tokens": 1.0, "speed/tokens_per_second": 2.0},
            rounding=0.0,
        )


class SeededSteps(ToyGaussianPolicy):
    def rollout(self, prompts: Sequence[PromptRecord], group_size: int, generator: torch.Generator) -> Rollout[Tensor]:
        rows = [record for record in prompts for _ in range(group_size)]
        seeds = draw_seeds(len(rows), generator)
        noise = torch.stack([torch.randn(len(self.table), generator=torch.Generator().manual_seed(s)) for s in seeds])
        states = self.table.detach() + noise
        log_probs = torch.distributions.Normal(self.table.detach(), 1.0).log_prob(states)
        mask = torch.ones_like(states, dtype=torch.bool)
        return Rollout(prompts=rows, samples=list(states), trajectory=states, log_probs=log_probs, mask=mask)


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
            if "user" in self.where:
                raise UserError("the disk is full")
            raise ZeroDivisionError("a bug")


KINDS = {kind.__name__: kind for kind in (SeededTokens, SeededSteps, Failing)}


def toys(kind: str, where: str = "") -> Trained:
    if where == "build":
        raise UserError("no such model")
    return Trained(policies={"toy": Failing(where) if kind == "Failing" else KINDS[kind]()})
