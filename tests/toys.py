"""Two complete little policies: one of tokens, one of Gaussian steps. No model, no library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from visual_grpo.common.decisions import GaussianLikelihoods, Likelihoods
from visual_grpo.common.types import PromptRecord, Rollout, Scores, Share
from visual_grpo.grpo.losses import k3_kl
from visual_grpo.grpo.metrics import is_timing


def records(count: int) -> list[PromptRecord]:
    return [PromptRecord(id=f"r{i}", prompt=f"prompt {i % 3}") for i in range(count)]


def reproducible(values: Mapping[str, float]) -> dict[str, float]:
    """The metrics that a seed reproduces bit for bit on a CPU."""
    return {name: value for name, value in values.items() if not is_timing(name)}


class ToyTokenPolicy:
    """Tokens drawn from one learned table [steps, vocabulary]; replays in one chunk."""

    def __init__(self, steps: int = 4, vocabulary: int = 5, replay_temperature: float = 1.0) -> None:
        self.table = nn.Parameter(torch.zeros(steps, vocabulary))
        self.reference = torch.zeros(steps, vocabulary)
        self.replay_temperature = replay_temperature

    def rollout(
        self, prompts: Sequence[PromptRecord], group_size: int, generator: torch.Generator, share: Share | None = None
    ) -> Rollout[Tensor]:
        rows = [record for record in prompts for _ in range(group_size)]
        log_probs = self.table.detach().log_softmax(-1)
        tokens = self.draw(log_probs, len(rows), generator, share)
        chosen = _gather(log_probs, tokens)
        # The second half of odd rows does not count, as after an end of sequence.
        mask = torch.ones_like(tokens, dtype=torch.bool)
        mask[1::2, tokens.shape[1] // 2 :] = False
        return Rollout(
            prompts=rows,
            samples=list(tokens),
            trajectory=tokens,
            log_probs=chosen,
            mask=mask,
            stats={"entropy": 1.0},
        )

    def draw(self, log_probs: Tensor, rows: int, generator: torch.Generator, share: Share | None) -> Tensor:
        """[rows, steps]"""
        return torch.multinomial(log_probs.exp(), rows, replacement=True, generator=generator).t()

    def replay(self, trajectory: Tensor, rows: Tensor) -> Iterator[Likelihoods]:
        tokens = trajectory[rows]
        log_probs = _gather((self.table / self.replay_temperature).log_softmax(-1), tokens)
        kl = k3_kl(log_probs, _gather(self.reference.log_softmax(-1), tokens))
        yield Likelihoods(steps=slice(0, tokens.shape[1]), log_probs=log_probs, kl=kl)

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [self.table]

    def adapter_state_dict(self) -> dict[str, Tensor]:
        return {"table": self.table.detach().clone()}

    def load_adapter_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.table.data.copy_(state["table"])


class ToyGaussianPolicy(ToyTokenPolicy):
    """Steps x ~ N(mean_s, 1) of a learned mean; replays one chunk a step, as a flow policy does."""

    def __init__(self, steps: int = 3) -> None:
        self.table = nn.Parameter(torch.zeros(steps))

    def rollout(
        self, prompts: Sequence[PromptRecord], group_size: int, generator: torch.Generator, share: Share | None = None
    ) -> Rollout[Tensor]:
        rows = [record for record in prompts for _ in range(group_size)]
        noise = self.noise(len(rows), generator, share)
        self.sampled_from = self.table.detach().clone()
        states = self.table.detach() + noise
        log_probs = torch.distributions.Normal(self.table.detach(), 1.0).log_prob(states)
        mask = torch.ones_like(states, dtype=torch.bool)
        return Rollout(prompts=rows, samples=list(states), trajectory=states, log_probs=log_probs, mask=mask)

    def noise(self, rows: int, generator: torch.Generator, share: Share | None) -> Tensor:
        """[rows, steps]"""
        return torch.randn(rows, len(self.table), generator=generator)

    def replay(self, trajectory: Tensor, rows: Tensor) -> Iterator[GaussianLikelihoods]:
        for step in range(trajectory.shape[1]):
            chosen = slice(step, step + 1)
            normal = torch.distributions.Normal(self.table[chosen], 1.0)
            kl = (self.table[chosen] ** 2 / 2).expand(len(rows), 1)
            moved = partial(self._moved, chosen, len(rows))
            log_probs = normal.log_prob(trajectory[rows, chosen])
            yield GaussianLikelihoods(steps=chosen, log_probs=log_probs, kl=kl, divergence=moved)

    def _moved(self, chosen: slice, rows: int) -> Tensor:
        return ((self.table - self.sampled_from).detach()[chosen] ** 2 / 2).expand(rows, 1)


@contextmanager
def given_gradients() -> Iterator[list[Tensor]]:
    """Those that optimisers are given in the block, in their order; the trainer frees them after the update."""
    given: list[Tensor] = []

    def noted(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        given.extend(parameter.grad.clone() for group in optimizer.param_groups for parameter in group["params"])

    hook = register_optimizer_step_pre_hook(noted)
    try:
        yield given
    finally:
        hook.remove()


@dataclass
class CountingScorer:
    """Reward: the share of a row's tokens that are ``target``; for Gaussian steps, the mean."""

    target: int = 2
    unscored: tuple[int, ...] = ()
    needs_whole_groups: ClassVar[bool] = False

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Scores:
        stacked = torch.stack(list(samples))
        if stacked.is_floating_point():
            total = stacked.mean(1)
        else:
            total = (stacked == self.target).float().mean(1)
        total[list(self.unscored)] = torch.nan
        return one_reward(total)

    def without_judges(self) -> CountingScorer:
        return self


def one_reward(total: Tensor) -> Scores:
    """Scores of the only reward, ``count``."""
    return Scores(total=total, rewards={"count": total}, parts={}, weights={"count": 1.0})


def _gather(log_probs: Tensor, tokens: Tensor) -> Tensor:
    return log_probs.expand(len(tokens), -1, -1).gather(2, tokens[..., None])[..., 0]
