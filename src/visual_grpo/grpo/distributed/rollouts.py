"""Rollouts and scores by all ranks: each generates whole groups of samples; rank 0 scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from visual_grpo.common.types import PromptRecord, Rollout, Sample, Scores, Share, begin_scoring
from visual_grpo.grpo.distributed import ranks


def roll_out(
    prompts: Sequence[PromptRecord],
    generator: torch.Generator,
    draw: Callable[[Sequence[PromptRecord], Share | None], list[Rollout[Any]]],
) -> list[Rollout[Any]]:
    """Returns the rollouts of ``draw(prompts, None)``, of which each rank generates its block of prompts, its share.

    The samples are the same as with one process. Each rank keeps only the trajectories of its own block.
    """
    if ranks.count() == 1:
        return draw(prompts, None)
    block = ranks.block(len(prompts))
    local: list[Rollout[Any]] = []

    def compute() -> Any:
        if not (own := prompts[block]):
            return None
        local.extend(draw(own, Share(block.start, len(own), len(prompts))))
        return [replace(rollout, trajectory=None) for rollout in local], generator.get_state()

    answers = [answer for answer in ranks.all_gather(compute) if answer is not None]
    generator.set_state(answers[0][1])  # Of a rank without a share, too.
    parts = zip(*(rollouts for rollouts, _ in answers), strict=True)
    return [_joined(part, local[number] if local else None) for number, part in enumerate(parts)]


@dataclass(frozen=True)
class RankZeroScorer:
    """A ``Scorer``: rank 0 runs the rewards and sends the scores to the other ranks."""

    local: Any
    """Rank 0's `rewards.combine.RewardSet`; None on the other ranks."""

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> Scores:
        return ranks.broadcast(lambda: self.local(prompts, samples))

    def begin(self, prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> Callable[[], Scores]:
        begun = ranks.run_on_all(lambda: begin_scoring(self.local, prompts, samples) if ranks.rank() == 0 else None)
        return lambda: ranks.broadcast(lambda: begun())  # type: ignore[misc]

    @property
    def needs_whole_groups(self) -> bool:
        return ranks.broadcast(lambda: bool(self.local.needs_whole_groups))

    def weighted(self, weights: Mapping[str, float]) -> RankZeroScorer:
        return RankZeroScorer(self.local and self.local.weighted(weights))

    def without_judges(self) -> RankZeroScorer:
        return RankZeroScorer(self.local and self.local.without_judges())


def _joined(parts: Sequence[Rollout[Any]], local: Rollout[Any] | None) -> Rollout[Any]:
    sizes = [len(part.samples) for part in parts]
    start = sum(sizes[: ranks.rank()])  # Ranks without a share come last.
    rows = 0 if local is None else len(local.samples)

    def stat(name: str) -> float:
        """Seconds of the slowest, the sum of speeds, means over rows of the rest."""
        values = [part.stats[name] for part in parts]
        if name.startswith("seconds/"):
            return max(values)
        return sum(values) if name.startswith("speed/") else float(np.average(values, weights=sizes))

    return Rollout(
        prompts=[prompt for part in parts for prompt in part.prompts],
        samples=[sample for part in parts for sample in part.samples],
        trajectory=local and local.trajectory,
        block=range(start, start + rows),
        log_probs=torch.cat([part.log_probs for part in parts]),
        mask=torch.cat([part.mask for part in parts]),
        stats={name: stat(name) for name in parts[0].stats},
        rounding=max(part.rounding for part in parts),
        turns=parts[0].turns,
    )
