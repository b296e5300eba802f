"""Samples of a training step: which prompts come next, their rollouts with scores, and the groups to train on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from visual_grpo.common.types import Policy, PromptRecord, Rollout, Scorer, Scores, begin_scoring
from visual_grpo.config import GRPOConfig
from visual_grpo.grpo.distributed.policy import roll_out
from visual_grpo.grpo.losses import zero_variance_groups
from visual_grpo.grpo.metrics import Clock

T = TypeVar("T")


class ScoredGroups(NamedTuple, Generic[T]):
    """The groups of a scored rollout that are trained on."""

    rollout: Rollout[T]
    scores: Scores
    groups: Tensor
    """[n] int64: their numbers in the rollout."""


class PromptOrder:
    """Endless passes over the prompts, each pass in another order; one draw holds prompts of one kind.

    The kind is the number of source images: tensors of different kinds differ in shape and cannot share a batch. Each
    draw takes the kind that is furthest behind in its passes, so that all are seen equally often. Draws depend on the
    seed and on ``positions``, the number of prompts drawn so far of each kind.
    """

    def __init__(self, kinds: Sequence[int], seed: int, positions: Mapping[str, int] | None = None) -> None:
        """``kinds``: the kind of each prompt; ``positions``: by the kind's name, to continue an order."""
        self.seed = seed
        self._members = {kind: [i for i, k in enumerate(kinds) if k == kind] for kind in sorted(set(kinds))}
        self.positions = {str(kind): (positions or {}).get(str(kind), 0) for kind in self._members}
        self._passes: dict[int, tuple[int, list[int]]] = {}

    @classmethod
    def over(
        cls, prompts: Iterable[PromptRecord], seed: int, positions: Mapping[str, int] | None = None
    ) -> PromptOrder:
        """Returns the order over these prompts, each of which is read once."""
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


def sample_and_score(
    policy: Policy[T],
    scorer: Scorer,
    prompts: Sequence[PromptRecord],
    config: GRPOConfig,
    generator: torch.Generator,
    clock: Clock,
) -> list[tuple[Rollout[T], Scores]]:
    """Draws rollouts of ``rollout_prompts`` prompts each; a remote reward judges one while the next is drawn."""
    size = config.rollout_prompts or len(prompts)
    rollouts: list[Rollout[T]] = []
    scores: list[Scores] = []
    finish: Callable[[], Scores] | None = None
    for start in range(0, len(prompts), size):
        with clock.phase("rollout"), torch.no_grad():
            (rollout,) = roll_out(
                prompts[start : start + size],
                generator,
                lambda part: [policy.rollout(part, config.group_size, generator)],
            )
        with clock.phase("reward"):
            if finish is not None:
                scores.append(finish())
            finish = begin_scoring(scorer, rollout.prompts, rollout.samples)
        rollouts.append(rollout)
    assert finish is not None
    with clock.phase("reward"):
        scores.append(finish())
    return list(zip(rollouts, scores, strict=True))


def all_groups(scored: Sequence[tuple[Rollout[T], Scores]], group_size: int) -> list[ScoredGroups[T]]:
    """Chooses every group of every rollout."""
    return [
        ScoredGroups(rollout, scores, torch.arange(len(rollout.samples) // group_size)) for rollout, scores in scored
    ]


def informative_groups(
    draw: Callable[[int], list[tuple[Rollout[T], Scores]]], config: GRPOConfig
) -> list[ScoredGroups[T]]:
    """DAPO's dynamic sampling (arXiv 2503.14476): replaces groups whose rewards are all equal.

    ``draw`` samples and scores so many prompts. It is called again at most ``max_refills`` times; after that, groups
    without variance are kept so that there are ``prompts_per_step``.
    """
    if not config.max_refills:
        return all_groups(draw(config.prompts_per_step), config.group_size)
    scored: list[tuple[Rollout[T], Scores]] = []
    constant: list[Tensor] = []
    missing = config.prompts_per_step
    for _ in range(1 + config.max_refills):
        refill = draw(missing)
        scored += refill
        constant += [zero_variance_groups(scores.total, config.group_size) for _, scores in refill]
        missing = config.prompts_per_step - sum(int((~flags).sum()) for flags in constant)
        if not missing:
            break
    chosen = [ScoredGroups(*pair, (~flags).nonzero()[:, 0]) for pair, flags in zip(scored, constant, strict=True)]
    for pair, flags in zip(scored, constant, strict=True):
        kept = flags.nonzero()[:missing, 0]
        chosen.append(ScoredGroups(*pair, kept))
        missing -= len(kept)
    return chosen
