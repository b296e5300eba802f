"""Samples of a training step: which prompts come next, their rollouts with scores, and the groups to train on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from visual_grpo.common.errors import UserError
from visual_grpo.common.types import (
    Policy,
    PromptRecord,
    Rollout,
    Scorer,
    Scores,
    TrainBatch,
    begin_scoring,
    checked_record,
)
from visual_grpo.config import GRPOConfig
from visual_grpo.grpo.advantages import combined_rewards, zero_variance_groups
from visual_grpo.grpo.distributed.rollouts import roll_out
from visual_grpo.grpo.metrics import Clock

T = TypeVar("T")


class ScoredRollout(NamedTuple, Generic[T]):
    """A rollout with its scores."""

    rollout: Rollout[T]
    scores: Scores
    groups: Tensor
    """[n] int64: the numbers of the groups that are trained on."""


def with_all_groups(rollout: Rollout[T], scores: Scores, group_size: int) -> ScoredRollout[T]:
    """Trains on every group of the rollout."""
    return ScoredRollout(rollout, scores, torch.arange(len(rollout.samples) // group_size))


class PromptOrder:
    """Endless passes over the prompts, each pass in a different order; one batch holds prompts of one kind.

    The kind is the number of source images: tensors of different kinds differ in shape and cannot share a batch. Each
    batch takes the kind that is furthest behind in its passes, so that all are seen equally often. The order depends on
    the seed and on ``positions``, the number of prompts taken so far of each kind.
    """

    def __init__(self, prompts: Sequence[PromptRecord], seed: int, positions: Mapping[str, int] | None = None) -> None:
        """``positions``: by the kind's name, to continue an order. Reads each prompt once."""
        if not isinstance(prompts, Sequence):
            raise UserError(f"prompts must be a list of PromptRecord, got a {type(prompts).__name__}")
        self.seed = seed
        kinds = [len(checked_record(prompt).source_images) for prompt in prompts]
        if not kinds:
            raise UserError("There are no prompts to train on; expected at least one PromptRecord.")
        self._members = {kind: [i for i, k in enumerate(kinds) if k == kind] for kind in sorted(set(kinds))}
        self.positions = {str(kind): (positions or {}).get(str(kind), 0) for kind in self._members}
        self._passes: dict[int, tuple[int, list[int]]] = {}

    def take(self, count: int) -> list[int]:
        """Indices of the next ``count`` prompts."""
        kind = min(self._members, key=lambda kind: self.positions[str(kind)] / len(self._members[kind]))
        members, start = self._members[kind], self.positions[str(kind)]
        taken = []
        for position in range(start, start + count):
            epoch, offset = divmod(position, len(members))
            taken.append(members[self._order(kind, epoch)[offset]])
        self.positions[str(kind)] += count
        return taken

    def _order(self, kind: int, epoch: int) -> list[int]:
        """Returns the order of a pass, in which no prompt follows itself: rewards would take two groups for one."""
        if self._passes.get(kind, (None, []))[0] != epoch:
            order = self._shuffled(kind, epoch)
            if epoch and len(order) > 2 and order[0] == self._shuffled(kind, epoch - 1)[-1]:
                order[:2] = order[1::-1]
            self._passes[kind] = epoch, order
        return self._passes[kind][1]

    def _shuffled(self, kind: int, epoch: int) -> list[int]:
        if len(self._members[kind]) == 2:
            epoch = 0  # They take turns.
        # torch's CPU generator reads 32 bits of its seed: the shift alone gives 0, 256, 512, ... one order.
        mixed = (self.seed << 24) + (self.seed >> 8) * 1_000_003 + epoch
        generator = torch.Generator().manual_seed(mixed)
        order: list[int] = torch.randperm(len(self._members[kind]), generator=generator).tolist()
        return order


def sample_and_score(
    policy: Policy[T],
    scorer: Scorer,
    prompts: Sequence[PromptRecord],
    config: GRPOConfig,
    generator: torch.Generator,
    clock: Clock,
) -> list[ScoredRollout[T]]:
    """Generates rollouts of ``rollout_prompts`` prompts each; a remote reward scores one meanwhile."""
    size = config.rollout_prompts or len(prompts)
    rollouts: list[Rollout[T]] = []
    scores: list[Scores] = []
    finish: Callable[[], Scores] | None = None
    for start in range(0, len(prompts), size):
        with clock.timed("rollout"), torch.no_grad():
            (rollout,) = roll_out(
                prompts[start : start + size],
                generator,
                lambda part, share: [policy.rollout(part, config.group_size, generator, share)],
            )
        with clock.timed("reward"):
            if finish is not None:
                scores.append(finish())
            finish = begin_scoring(scorer, rollout.prompts, rollout.samples)
        rollouts.append(rollout)
    assert finish is not None
    with clock.timed("reward"):
        scores.append(finish())
    return [with_all_groups(*pair, config.group_size) for pair in zip(rollouts, scores, strict=True)]


def informative_groups(scored: Sequence[ScoredRollout[T]], config: GRPOConfig) -> tuple[list[ScoredRollout[T]], int]:
    """Chooses the groups to train on; returns how many more could replace some of them.

    With ``max_refills``, DAPO's dynamic sampling (arXiv 2503.14476): groups whose rewards are all equal only fill up
    what is missing to ``prompts_per_step``.
    """
    if not config.max_refills:
        return list(scored), 0
    constant = [zero_variance_groups(combined_rewards(part.scores, config), config.group_size) for part in scored]
    missing = left = config.prompts_per_step - sum(int((~flags).sum()) for flags in constant)
    chosen = [part._replace(groups=(~flags).nonzero()[:, 0]) for part, flags in zip(scored, constant, strict=True)]
    for part, flags in zip(scored, constant, strict=True):
        kept = flags.nonzero()[:left, 0]
        chosen.append(part._replace(groups=kept))
        left -= len(kept)
    return chosen, missing


def require_scored(batches: Sequence[TrainBatch[Any]], scores: Sequence[Scores], step: int) -> None:
    """Raises UserError, with the rewards that scored nothing, if there is no sample to train on."""
    if batches:
        return
    weighted = [name for name, weight in scores[0].weights.items() if weight]
    silent = [name for name in weighted if all(s.rewards[name].isnan().all() for s in scores)]
    who = f"the reward{'s' * (len(silent) > 1)} {', '.join(silent)} scored none of them"
    between = f"each lacks a score of one of the rewards {', '.join(weighted)}"
    raise UserError(
        f"No sample of step {step} could be scored: {who if silent else between}, and without a score"
        " there is nothing to train on. Look at what the reward returns for these prompts, or set its weight to 0."
    )
