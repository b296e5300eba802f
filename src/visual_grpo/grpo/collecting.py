"""What a step trains on: samples of the next prompts, their scores, and their advantages within each group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from visual_grpo.common.errors import UserError
from visual_grpo.common.types import Policy, PromptRecord, Rollout, Scorer, Scores, begin_scoring
from visual_grpo.config import GRPOConfig
from visual_grpo.grpo import metrics
from visual_grpo.grpo.distributed.policy import roll_out
from visual_grpo.grpo.losses import LOSSES, gdpo_advantages, group_advantages, zero_variance_groups
from visual_grpo.grpo.update import Experience

T = TypeVar("T")


class PromptOrder:
    """Endless passes over the prompts, each pass in another order; one draw holds prompts of one kind.

    Prompts with another number of source images are of another kind: their tensors differ in shape and cannot share a
    batch. Each draw takes the kind that is furthest behind in its passes, so that all are seen equally often. Draws
    depend on the seed and on ``positions``, the number of prompts drawn so far of each kind.
    """

    def __init__(self, kinds: Sequence[int], seed: int, positions: Mapping[str, int] | None = None) -> None:
        """``kinds``: one for each prompt; ``positions``: those of an order to continue, by the kind's name."""
        self.seed = seed
        self._members = {kind: [i for i, own in enumerate(kinds) if own == kind] for kind in sorted(set(kinds))}
        self.positions = {str(kind): (positions or {}).get(str(kind), 0) for kind in self._members}
        self._passes: dict[int, tuple[int, list[int]]] = {}

    @classmethod
    def over(
        cls, prompts: Iterable[PromptRecord], seed: int, positions: Mapping[str, int] | None = None
    ) -> PromptOrder:
        """By their number of source images. Reads every record once."""
        return cls([len(prompt.source_images) for prompt in prompts], seed, positions)

    def draw(self, count: int) -> list[int]:
        """Indices of the next ``count`` prompts."""
        kind = min(self._members, key=lambda kind: self.positions[str(kind)] / len(self._members[kind]))
        members, start = self._members[kind], self.positions[str(kind)]
        drawn = []
        for position in range(start, start + count):
            epoch, offset = divmod(position, len(members))
            drawn.append(members[self._order(kind, epoch)[offset]])
        self.positions[str(kind)] += count
        return drawn

    def _order(self, kind: int, epoch: int) -> list[int]:
        if self._passes.get(kind, (None, []))[0] != epoch:
            generator = torch.Generator().manual_seed((self.seed << 24) + epoch)
            self._passes[kind] = epoch, torch.randperm(len(self._members[kind]), generator=generator).tolist()
        return self._passes[kind][1]


class Collector(Generic[T]):
    """Draws from ``policy``, asks ``scorer``, and compares within groups."""

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

        DAPO's dynamic sampling (arXiv 2503.14476) replaces groups without variance up to ``max_refills`` times, and
        keeps them if it cannot.
        """
        size, wanted = self.config.group_size, self.config.prompts_per_step
        drawn = self.sample([prompts[i] for i in order.draw(wanted)], clock, generator)
        if not self.config.max_refills:
            return self.all_groups(drawn, step), drawn
        constant = [zero_variance_groups(scores.total, size) for _, scores in drawn]
        missing = sum(int(own.sum()) for own in constant)
        for _ in range(self.config.max_refills):
            if not missing:
                break
            more = self.sample([prompts[i] for i in order.draw(missing)], clock, generator)
            drawn += more
            constant += [zero_variance_groups(scores.total, size) for _, scores in more]
            missing = wanted - sum(int((~own).sum()) for own in constant)
        kept = [(*own, (~same).nonzero()[:, 0]) for own, same in zip(drawn, constant, strict=True)]
        for own, same in zip(drawn, constant, strict=True):
            take = same.nonzero()[:missing, 0]
            kept.append((*own, take))
            missing -= len(take)
        return self._experiences(kept, step), drawn

    def sample(
        self, prompts: Sequence[PromptRecord], clock: metrics.Clock, generator: torch.Generator
    ) -> list[tuple[Rollout[T], Scores]]:
        """Rollouts of ``rollout_prompts`` prompts each; while one is drawn, the one before may be judged elsewhere."""
        size = self.config.rollout_prompts or len(prompts)
        rollouts: list[Rollout[T]] = []
        scores: list[Scores] = []
        finish: Callable[[], Scores] | None = None
        for start in range(0, len(prompts), size):
            with clock.phase("rollout"), torch.no_grad():
                (rollout,) = roll_out(
                    prompts[start : start + size],
                    generator,
                    lambda own: [self.policy.rollout(own, self.config.group_size, generator)],
                )
            with clock.phase("reward"):
                if finish is not None:
                    scores.append(finish())
                finish = begin_scoring(self.scorer, rollout.prompts, rollout.samples)
            rollouts.append(rollout)
        assert finish is not None
        with clock.phase("reward"):
            scores.append(finish())
        return list(zip(rollouts, scores, strict=True))

    def all_groups(self, drawn: Sequence[tuple[Rollout[T], Scores]], step: int) -> list[Experience[T]]:
        """All groups of rollouts, whatever their variance. Raises UserError if not one sample is scored."""
        size = self.config.group_size
        whole = [(rollout, scores, torch.arange(len(rollout.samples) // size)) for rollout, scores in drawn]
        return self._experiences(whole, step)

    def _experiences(self, kept: list[tuple[Rollout[T], Scores, Tensor]], step: int) -> list[Experience[T]]:
        size = self.config.group_size
        kept = [part for part in kept if len(part[2])]
        rows = [(groups[:, None] * size + torch.arange(size)).reshape(-1) for _, _, groups in kept]
        parts = self._advantages([scores for _, scores, _ in kept], rows).split([len(chosen) for chosen in rows])
        experiences = []
        for (rollout, scores, _), chosen, own in zip(kept, rows, parts, strict=True):
            advantages = torch.zeros(len(scores.total))
            advantages[chosen] = own
            scored = chosen[~scores.total[chosen].isnan()]
            if len(scored):
                old = rollout.log_probs.clone() if self.replayed else None
                experiences.append(
                    Experience(
                        rollout=rollout, scores=scores, rows=scored, advantages=advantages, replayed_log_probs=old
                    )
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
