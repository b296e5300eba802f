"""What a step trains on: samples of the next prompts, their scores, and their advantages within each group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from visual_grpo.config import GRPOConfig
from visual_grpo.errors import UserError
from visual_grpo.grpo import metrics
from visual_grpo.grpo.losses import LOSSES, gdpo_advantages, group_advantages, zero_variance_groups
from visual_grpo.grpo.order import PromptOrder
from visual_grpo.grpo.update import Experience
from visual_grpo.types import Policy, PromptRecord, Rollout, Scorer, Scores, begin_scoring

T = TypeVar("T")


class Collector(Generic[T]):
    """Draws from ``policy`` and asks ``scorer``."""

    def __init__(self, policy: Policy[T], scorer: Scorer, config: GRPOConfig, *, replayed: bool = False) -> None:
        """``replayed``: the ratio compares with log-probs of the replay, which the first update fills in."""
        self.policy, self.scorer, self.config, self.replayed = policy, scorer, config, replayed

    def collect(
        self,
        prompts: Sequence[PromptRecord],
        order: PromptOrder,
        clock: metrics.Clock,
        generator: torch.Generator,
        step: int,
    ) -> tuple[list[Experience[T]], list[metrics.Drawn]]:
        """Exactly ``prompts_per_step`` groups to train on, and everything that was drawn for them.

        DAPO's dynamic sampling (arXiv 2503.14476) replaces groups without variance up to
        ``max_refills`` times, and keeps them if it cannot.
        """
        size, wanted = self.config.group_size, self.config.prompts_per_step
        kept: list[tuple[Rollout[T], Scores, Tensor]] = []
        spare: list[tuple[Rollout[T], Scores, Tensor]] = []
        drawn: list[metrics.Drawn] = []
        count = 0
        for _ in range(1 + self.config.max_refills):
            chosen = [prompts[i] for i in order.draw(wanted - count)]
            for rollout, scores in self.sample(chosen, clock, generator):
                drawn.append((rollout, scores))
                constant = zero_variance_groups(scores.total, size)
                if not self.config.max_refills:
                    constant = torch.zeros_like(constant)
                for groups, store in ((~constant, kept), (constant, spare)):
                    if groups.any():
                        store.append((rollout, scores, groups.nonzero()[:, 0]))
                count += int((~constant).sum())
            if count == wanted:
                break
        for rollout, scores, groups in spare:
            take = groups[: wanted - count]
            if len(take):
                kept.append((rollout, scores, take))
                count += len(take)
        return self._experiences(kept, step), drawn

    def sample(
        self, prompts: Sequence[PromptRecord], clock: metrics.Clock, generator: torch.Generator
    ) -> list[tuple[Rollout[T], Scores]]:
        """Rollouts of ``rollout_prompts`` prompts each; while one is drawn, the one before may be judged elsewhere."""
        size = self.config.rollout_prompts or len(prompts)
        done: list[tuple[Rollout[T], Scores]] = []
        begun: tuple[Rollout[T], Callable[[], Scores]] | None = None
        for start in range(0, len(prompts), size):
            with clock.phase("rollout"), torch.no_grad():
                rollout = self.policy.rollout(prompts[start : start + size], self.config.group_size, generator)
            with clock.phase("reward"):
                if begun is not None:
                    done.append((begun[0], begun[1]()))
                begun = rollout, begin_scoring(self.scorer, rollout.prompts, rollout.samples)
        if begun is not None:
            with clock.phase("reward"):
                done.append((begun[0], begun[1]()))
        return done

    def of_whole(self, drawn: Sequence[tuple[Rollout[T], Scores]], step: int) -> list[Experience[T]]:
        """All groups of rollouts, whatever their variance.

        Raises:
            UserError: not one sample is scored.
        """
        size = self.config.group_size
        whole = [(rollout, scores, torch.arange(len(rollout.samples) // size)) for rollout, scores in drawn]
        return self._experiences(whole, step)

    def _experiences(self, kept: list[tuple[Rollout[T], Scores, Tensor]], step: int) -> list[Experience[T]]:
        size = self.config.group_size
        rows = [(groups[:, None] * size + torch.arange(size)).reshape(-1) for _, _, groups in kept]
        advantages = self._advantages([scores for _, scores, _ in kept], rows)
        experiences = []
        parts = advantages.split([len(chosen) for chosen in rows])
        for (rollout, scores, _), chosen, own in zip(kept, rows, parts, strict=True):
            every = torch.zeros(len(scores.total))
            every[chosen] = own
            scored = chosen[~scores.total[chosen].isnan()]
            if len(scored):
                old = rollout.log_probs.clone() if self.replayed else None
                experiences.append(
                    Experience(rollout=rollout, scores=scores, rows=scored, advantages=every, replayed_log_probs=old)
                )
        if not experiences:
            raise UserError(_nothing_scored(step, [scores for _, scores, _ in kept]))
        return experiences

    def _advantages(self, scores: list[Scores], rows: list[Tensor]) -> Tensor:
        """[b] advantages of the chosen rows of all rollouts together."""
        config = self.config
        shared: dict[str, Any] = {"epsilon": config.advantage_epsilon, "clip": config.advantage_clip}
        if config.combine == "gdpo":
            rewards = {
                name: torch.cat([s.rewards[name][r] for s, r in zip(scores, rows, strict=True)])
                for name in scores[0].rewards
            }
            return gdpo_advantages(rewards, scores[0].weights, config.group_size, **shared)
        total = torch.cat([s.total[r] for s, r in zip(scores, rows, strict=True)])
        scale = config.advantage_scale or LOSSES[config.loss].advantage_scale
        return group_advantages(total, config.group_size, scale=scale, **shared)


def _nothing_scored(step: int, scores: Sequence[Scores]) -> str:
    """Names the rewards that make every total missing."""
    weighted = [name for name, weight in scores[0].weights.items() if weight]
    silent = [name for name in weighted if all(own.rewards[name].isnan().all() for own in scores)]
    who = f"the reward{'s' * (len(silent) > 1)} {', '.join(silent)} scored none of them"
    between = f"each lacks a score of one of the rewards {', '.join(weighted)}"
    return (
        f"No sample of step {step} could be scored: {who if silent else between}, and without a score"
        " there is nothing to train on. Look at what the reward returns for these prompts, or set its weight to 0."
    )
