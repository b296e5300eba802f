"""Metrics of a training step."""

from __future__ import annotations

import math
import re
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from visual_grpo.common.types import Rollout, Scores, StepMetrics, TrainBatch
from visual_grpo.config import GRPOConfig
from visual_grpo.grpo.advantages import Scale, combined_rewards, group_advantages, used_rewards, zero_variance_share

SAMPLER_GAP = "sampler_gap"
_TRAINERS = ("approx_kl", "kl", SAMPLER_GAP)
"""Metrics of decisions that the algorithm does not compute itself."""


@dataclass
class Clock:
    """Wall seconds spent in each named phase, and the process's CPU seconds in all of them."""

    device: str = "cpu"
    """The model's device: on a GPU, a phase ends when its kernels have."""
    seconds: dict[str, float] = field(default_factory=dict)
    cpu: float = 0.0

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the seconds of the block to the phase ``name``."""
        started, cpu = time.perf_counter(), time.process_time()
        try:
            yield
            if torch.device(self.device).type == "cuda":  # An error of a kernel shows here, and is of this phase.
                torch.cuda.synchronize(self.device)
        except Exception as error:
            error.add_note(f"In the phase {name} of the training step.")
            raise
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
            self.cpu += time.process_time() - cpu


@dataclass
class UpdateMetrics:
    """Sums over counted decisions; a mean is taken only at the end."""

    steps: int = 0
    loss: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    max_gap: float = 0.0
    """Largest |log-ratio| between sampler and replay, in nats; measured while the weights are those that sampled."""
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    moved: float | None = None
    """KL by which the step's updates so far have moved the policy; None = not measured."""
    failure: Exception | None = None
    """Why the gradient is not complete."""
    skipped: bool = False
    """True if nothing was updated, because the loss or its gradient was not finite."""

    def record(self, loss: Tensor, metrics: Mapping[str, Tensor], counted: Tensor) -> None:
        """Adds what a `PolicyLoss` returned."""
        self.loss += float(loss.detach())
        self.steps += int(counted.sum())
        for name, values in metrics.items():
            self._add(name, values, counted)

    def record_gap(self, gap: Tensor, counted: Tensor) -> None:
        gap = torch.where(counted, gap, 0.0)
        self._add(SAMPLER_GAP, gap, counted)
        self.max_gap = max(self.max_gap, float(gap.max()))

    def _add(self, name: str, values: Tensor, counted: Tensor) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + float((values * counted).double().sum())

    def join(self, other: UpdateMetrics) -> None:
        """Adds the sums of one rank."""
        self.steps, self.loss = self.steps + other.steps, self.loss + other.loss
        self.sums = {name: self.sums.get(name, 0.0) + other.sums.get(name, 0.0) for name in {**self.sums, **other.sums}}
        self.max_gap = max(self.max_gap, other.max_gap)
        self.failure = self.failure or other.failure

    def means(self) -> dict[str, float]:
        return {name: total / max(self.steps, 1) for name, total in self.sums.items()}


def step_metrics(
    step: int,
    scored: Sequence[tuple[Rollout, Scores]],
    batches: Sequence[TrainBatch[Any]],
    updates: list[UpdateMetrics],
    clock: Clock,
    config: GRPOConfig,
    *,
    replays: bool,
) -> StepMetrics:
    """Rewards of every generated sample, losses of the last update, ratios of each, speed and memory.

    ``replays``: the ratio's denominator is the replay's log-probs.
    """
    rollouts, scores = zip(*scored, strict=True)
    advantages = torch.cat([batch.advantages[batch.rows] for batch in batches])
    values = _reward_metrics(scores, config)
    values["advantage/mean"] = float(advantages.mean())
    values["advantage/abs_mean"] = float(advantages.abs().mean())
    values |= _update_metrics(updates, replays=replays)
    if config.non_finite != "stop":
        values["updates_skipped"] = float(sum(stats.skipped for stats in updates))
    values |= _speed_metrics(rollouts, clock)
    for rollout in rollouts:  # The policy's own: seconds add up over refills, the rest is averaged.
        for name, value in rollout.stats.items():
            share = 1.0 if name.startswith("seconds/") else 1.0 / len(rollouts)
            values[name] = values.get(name, 0.0) + share * value
    return StepMetrics(
        step=step,
        values=values,
        prompts=rollouts[0].prompts,
        samples=rollouts[0].samples,
        rewards=scores[0].total.tolist(),
    )


def _reward_metrics(scores: Sequence[Scores], config: GRPOConfig) -> dict[str, float]:
    """Returns means over the step; a reward or part that scored nothing has none."""
    group_size = config.group_size
    total, learned = torch.cat([s.total for s in scores]), torch.cat([combined_rewards(s, config) for s in scores])
    values = {
        "reward/total": _mean(total),
        "reward/total_std": _mean(_group_std(total, group_size)),
        "reward/unscored_share": float(total.isnan().float().mean()),
        "zero_variance_share": zero_variance_share(learned, group_size),
    }
    rewards = {name: torch.cat([s.rewards[name] for s in scores]) for name in scores[0].rewards}
    for name, column in rewards.items():
        values[f"reward/{name}"] = _mean(column)
        values[f"reward/{name}_std"] = _mean(_group_std(column, group_size))
    weights = scores[0].weights
    if sum(weight != 0 for weight in weights.values()) > 1:
        shares = variance_shares(
            rewards, weights, group_size, normalise=config.combine == "gdpo", epsilon=config.advantage_epsilon
        )
        values |= {f"advantage_share/{name}": share for name, share in shares.items()}
    # A rollout that a server scored nothing of lacks parts.
    for name in dict.fromkeys(name for s in scores for name in s.parts):
        values[f"part/{name}"] = _mean(torch.cat([s.parts[name] for s in scores if name in s.parts]))
    for name in dict.fromkeys(name for s in scores for name in s.ratios):
        above, below = (torch.cat([s.ratios[name][side] for s in scores if name in s.ratios]) for side in (0, 1))
        # Means over the same samples: their quotient is the ratio of the sums.
        values[f"part/{name}"] = _mean(above) / _mean(below) if _mean(below) else math.nan
    return {name: value for name, value in values.items() if not math.isnan(value)}


def variance_shares(
    rewards: Mapping[str, Tensor],
    weights: Mapping[str, float],
    group_size: int,
    *,
    normalise: bool = False,
    epsilon: float = 1e-4,
) -> dict[str, float]:
    """The share of each weighted reward in the variance of the total within groups; they add up to 1.

    It is the covariance of the weighted reward with the total, divided by the total's variance: a reward with a share
    near 0 is drowned by the other rewards, whatever its weight, and one below 0 is worked against. Rows that a weighted
    reward leaves unscored do not count. Empty where no total differs within its group.

    ``rewards`` are [B]; ``normalise``: each in its group before it is weighted, as `gdpo_rewards` does.
    """
    used, unscored = used_rewards(rewards, weights)
    scale: Scale = "group" if normalise else "none"
    terms = {}
    for name in used:
        scored = rewards[name].masked_fill(unscored, torch.nan)
        advantages = group_advantages(scored, group_size, scale=scale, epsilon=epsilon, clip=None)
        terms[name] = weights[name] * advantages.double()
    total = torch.stack(list(terms.values())).sum(0)
    variance = total.square().sum()
    return {name: float((term * total).sum() / variance) for name, term in terms.items()} if variance else {}


def _update_metrics(updates: list[UpdateMetrics], *, replays: bool) -> dict[str, float]:
    first, last = updates[0].means(), updates[-1].means()
    values = {"loss": updates[-1].loss}
    measured = SAMPLER_GAP in first
    if measured:  # The first ratio to the replay is exactly 1.
        values["ratio/first_max_abs_log"] = 0.0 if replays else updates[0].max_gap
    for name, mean in last.items():
        if name != SAMPLER_GAP:
            values["ratio/mean" if name == "ratio" else name] = mean
    values |= {"grad_norm": updates[-1].grad_norm, "learning_rate": updates[-1].learning_rate}
    if updates[-1].moved is not None:
        values["step_kl"] = updates[-1].moved
    if replays and measured:
        values |= {f"{SAMPLER_GAP}/mean": first[SAMPLER_GAP], f"{SAMPLER_GAP}/max": updates[0].max_gap}
    for number, stats in enumerate(updates, 1):
        own = {name: mean for name, mean in stats.means().items() if name not in _TRAINERS}
        values |= {f"update_{number}/{name}": mean for name, mean in {**own, "grad_norm": stats.grad_norm}.items()}
    return values


def _speed_metrics(rollouts: Sequence[Rollout], clock: Clock) -> dict[str, float]:
    seconds = sum(clock.seconds.values())
    samples = sum(len(r.samples) for r in rollouts)
    decisions = sum(int(r.mask.sum()) for r in rollouts)
    values = {f"seconds/{name}": spent for name, spent in clock.seconds.items()}
    return values | {
        "seconds/step": seconds,
        "seconds/cpu": clock.cpu,
        "speed/samples_per_second": samples / seconds,
        "speed/decisions_per_second": decisions / seconds,
        "samples": float(samples),
        "memory_gb": memory_gb(clock.device),
    }


def memory_gb(device: str) -> float:
    """Peak memory of this process, in 10^9 bytes: on the model's GPU, or resident where it computes on the CPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def is_timing(name: str) -> bool:
    """True for the metrics that depend on the machine and not on the seed, of the run or of one module."""
    return re.search(r"(^|/)(seconds/|speed/|memory_gb$)", name) is not None


def _group_std(values: Tensor, group_size: int) -> Tensor:
    groups = values.view(-1, group_size)
    scored = ~groups.isnan()
    counts = scored.sum(1)
    mean = groups.nan_to_num(0.0).sum(1) / counts.clamp(min=1)
    squares = torch.where(scored, (groups - mean[:, None]).square(), 0.0).sum(1)
    return torch.where(counts > 1, (squares / (counts - 1).clamp(min=1)).sqrt(), torch.nan)


def _mean(values: Tensor) -> float:
    """Mean over scored values; NaN if there is none."""
    return float(values[~values.isnan()].double().mean())
