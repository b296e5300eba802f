"""A policy, a model and a scorer of which each rank does its part: whole groups of samples; rank 0 scores.

Shapes: B rows of a rollout, b of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from visual_grpo.config import SamplerConfig
from visual_grpo.distributed import group
from visual_grpo.types import (
    AdaptedModel,
    Adapters,
    JointPolicy,
    JointRollout,
    Policy,
    PromptRecord,
    ReplayChunk,
    Rollout,
    Sample,
    Scores,
    begin_scoring,
)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class LocalPart(Generic[T]):
    """The trajectory of the rows that this rank drew of a rollout."""

    trajectory: T | None
    """None: it drew none."""
    start: int
    rows: int

    def among(self, rows: Tensor) -> Tensor:
        """Those of ``rows`` ([b]) that are here."""
        return rows[(rows >= self.start) & (rows < self.start + self.rows)]


class DistributedPolicy(Generic[T]):
    """Satisfies ``types.Policy[LocalPart]``."""

    def __init__(self, local: Policy[T]) -> None:
        self.local = local

    def rollout(
        self, prompts: Sequence[PromptRecord], group_size: int, generator: torch.Generator
    ) -> Rollout[LocalPart[T]]:
        """Returns the samples that one process would draw; each rank keeps only the trajectories that it drew."""
        (rollout,) = _roll_out(prompts, generator, lambda own: [self.local.rollout(own, group_size, generator)])
        assert rollout is not None
        return rollout

    def replay(self, trajectory: LocalPart[T], rows: Tensor) -> Iterator[ReplayChunk]:
        """``rows`` must be among those of this rank."""
        assert trajectory.trajectory is not None
        yield from self.local.replay(trajectory.trajectory, rows - trajectory.start)

    def trainable_parameters(self) -> list[nn.Parameter]:
        return self.local.trainable_parameters()

    def adapter_state_dict(self) -> dict[str, Tensor]:
        return self.local.adapter_state_dict()

    def load_adapter_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.local.load_adapter_state_dict(state)


class DistributedJointPolicy:
    """Satisfies ``types.JointPolicy``."""

    def __init__(self, local: JointPolicy) -> None:
        self.local = local

    def joint_rollout(
        self, prompts: Sequence[PromptRecord], outer_size: int, inner_size: int, generator: torch.Generator
    ) -> JointRollout:
        def draw(own: Sequence[PromptRecord]) -> list[Rollout[Any] | None]:
            joint = self.local.joint_rollout(own, outer_size, inner_size, generator)
            return [joint.outer, joint.inner]

        outer, inner = _roll_out(prompts, generator, draw)
        return JointRollout(outer=outer, inner=inner)


class DistributedModel:
    """Satisfies ``types.AdaptedModel``: each rank draws its block of the records."""

    def __init__(self, local: AdaptedModel) -> None:
        self.local = local

    @property
    def adapters(self) -> Adapters:
        return self.local.adapters

    def generate(
        self, records: Sequence[PromptRecord], seeds: Sequence[int], sampler: SamplerConfig
    ) -> Sequence[Sample]:
        start, size = group.blocks(len(records), group.count())[group.rank()]
        own = slice(start, start + size)
        parts = group.everyone(lambda: list(self.local.generate(records[own], seeds[own], sampler)) if size else [])
        return [sample for part in parts for sample in part]


class _LeadingModel(DistributedModel):
    def generate(
        self, records: Sequence[PromptRecord], seeds: Sequence[int], sampler: SamplerConfig
    ) -> Sequence[Sample]:
        group.from_first(lambda: (records, seeds, sampler))
        return super().generate(records, seeds, sampler)


@contextmanager
def leading(local: AdaptedModel) -> Iterator[DistributedModel]:
    """On rank 0, where it alone knows what is to be drawn: the others `follow`."""
    yield _LeadingModel(local)
    group.from_first(lambda: None)


def follow(local: AdaptedModel) -> None:
    """Draws this rank's share of whatever rank 0 draws, until its `leading` ends."""
    while (call := group.received()) is not None:
        DistributedModel(local).generate(*call)


class FirstScores:
    """Satisfies ``types.Scorer``: rank 0 asks the rewards, the others are told."""

    def __init__(self, local: Any) -> None:
        """``local``: rank 0's `rewards.combine.RewardSet`; None on the others."""
        self.local = local

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> Scores:
        return group.from_first(lambda: self.local(prompts, samples))

    def begin(self, prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> Callable[[], Scores]:
        begun = group.together(lambda: begin_scoring(self.local, prompts, samples) if group.rank() == 0 else None)
        return lambda: group.from_first(lambda: begun())  # type: ignore[misc]

    def weighted(self, weights: Mapping[str, float]) -> FirstScores:
        return FirstScores(self.local and self.local.weighted(weights))


def _roll_out(
    prompts: Sequence[PromptRecord],
    generator: torch.Generator,
    draw: Callable[[Sequence[PromptRecord]], list[Rollout[Any] | None]],
) -> list[Rollout[Any] | None]:
    """Draws this rank's block of ``prompts``; returns each of the rollouts of ``draw`` with everyone's rows."""
    start, size = group.blocks(len(prompts), group.count())[group.rank()]
    local: list[Rollout[Any] | None] = []

    def compute() -> Any:
        if not size:
            return None
        with group.share(start, size, len(prompts)), torch.no_grad():
            local.extend(draw(prompts[start : start + size]))
        return [own and replace(own, trajectory=None) for own in local], generator.get_state()

    answers = [own for own in group.everyone(compute) if own is not None]
    generator.set_state(answers[0][1])  # Of a rank without a share, too.
    parts = zip(*(rollouts for rollouts, _ in answers), strict=True)
    return [_joined(own, local[number] if local else None) for number, own in enumerate(parts)]


def _joined(parts: Sequence[Rollout[Any] | None], local: Rollout[Any] | None) -> Rollout[LocalPart[Any]] | None:
    present = [own for own in parts if own is not None]
    if not present:
        return None
    sizes = [len(own.samples) for own in present]
    start = sum(sizes[: group.rank()])  # Ranks without a share come last.
    rows = 0 if local is None else len(local.samples)
    return Rollout(
        prompts=[prompt for own in present for prompt in own.prompts],
        samples=[sample for own in present for sample in own.samples],
        trajectory=LocalPart(trajectory=local and local.trajectory, start=start, rows=rows),
        log_probs=torch.cat([own.log_probs for own in present]),
        mask=torch.cat([own.mask for own in present]),
        stats=_joined_stats([own.stats for own in present], sizes),
        rounding=max(own.rounding for own in present),
    )


def _joined_stats(stats: Sequence[Mapping[str, float]], rows: Sequence[int]) -> dict[str, float]:
    """Seconds of the slowest, the sum of speeds, means over rows of the rest."""
    joined = {}
    for name in stats[0]:
        values = [own[name] for own in stats]
        if name.startswith("seconds/"):
            joined[name] = max(values)
        elif name.startswith("speed/"):
            joined[name] = sum(values)
        else:
            joined[name] = sum(value * size for value, size in zip(values, rows, strict=True)) / sum(rows)
    return joined
