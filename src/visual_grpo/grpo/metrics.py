"""Metrics of a training step."""

from __future__ import annotations

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

from visual_grpo.common.types import ReplayChunk, Rollout, Scores, StepMetrics, TrainBatch
from visual_grpo.config import GRPOConfig
from visual_grpo.grpo.losses import Scale, combined_rewards, group_advantages, used_rewards, zero_variance_groups

SAMPLER_GAP = "sampler_gap"


@dataclass
class Clock:
    """Wall seconds spent in each named phase, and the process's CPU seconds in all of them."""

    device: str = "cpu"
    """The model's device: on a GPU, a phase ends when its kernels have."""
    seconds: dict[str, float] = field(default_factory=dict)
    cpu: float = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
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
    """Sums over counted steps; a mean is taken only at the end."""

    steps: int = 0
    loss: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    max_abs_log_ratio: float = 0.0
    max_sampler_gap: float = 0.0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    moved: float | None = None
    """KL by which the step's updates so far have moved the policy; None = not measured."""
    skipped: bool = False
    """True if nothing was updated, because the loss or its gradient was not finite."""

    def record(self, loss: Tensor, metrics: Mapping[str, Tensor], counted: Tensor) -> None:
        """Adds what a `PolicyLoss` returned."""
        self.loss += float(loss.detach())
        self.steps += int(counted.sum())
        for name, values in metrics.items():
            self.add(name, values, counted)
        self.max_abs_log_ratio = max(self.max_abs_log_ratio, float(metrics["abs_log_ratio"].max()))

    def record_gap(self, batch: TrainBatch[Any], chunk: ReplayChunk, rows: Tensor) -> None:
        """Adds the gap between the sampler's log-probs of ``rows`` ([b]) and their on-policy replay."""
        log_probs, counted = chunk.log_probs.detach(), batch.rollout.mask[rows][:, chunk.steps]
        gap = torch.where(counted, log_probs - batch.rollout.log_probs[rows][:, chunk.steps], 0.0).abs()
        self.add(SAMPLER_GAP, gap, counted)
        self.max_sampler_gap = max(self.max_sampler_gap, float(gap.max()))

    def add(self, name: str, values: Tensor, counted: Tensor) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + float((values * counted).double().sum())

    def join(self, other: UpdateMetrics) -> None:
        """Adds the sums of another rank."""
        self.steps, self.loss = self.steps + other.steps, self.loss + other.loss
        self.sums = {name: self.sums.get(name, 0.0) + other.sums.get(name, 0.0) for name in {**self.sums, **other.sums}}
        self.max_abs_log_ratio = max(self.max_abs_log_ratio, other.max_abs_log_ratio)
        self.max_sampler_gap = max(self.max_sampler_gap, other.max_sampler_gap)

    def log_ratio_stats(self) -> tuple[float, float]:
        """Returns mean and largest |log ratio| between the first update's replay and the sampler, in nats."""
        means = self.means()
        if SAMPLER_GAP in means:
            return means[SAMPLER_GAP], self.max_sampler_gap
        return means["abs_log_ratio"], self.max_abs_log_ratio

    def means(self) -> dict[str, float]:
        return {name: total / max(self.steps, 1) for name, total in self.sums.items()}


def step_metrics(
    step: int,
    rollouts: Sequence[Rollout],
    scores: Sequence[Scores],
    batches: Sequence[TrainBatch[Any]],
    updates: list[UpdateMetrics],
    clock: Clock,
    config: GRPOConfig,
) -> StepMetrics:
    """Rewards of every sample drawn, losses of the last update, ratios of each, speed and memory."""
    advantages = torch.cat([batch.advantages[batch.rows] for batch in batches])
    values = _reward_metrics(scores, config)
    values["advantage/mean"] = float(advantages.mean())
    values["advantage/abs_mean"] = float(advantages.abs().mean())
    values |= _update_metrics(updates)
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
    group_size = config.group_size
    total, learned = torch.cat([s.total for s in scores]), torch.cat([combined_rewards(s, config) for s in scores])
    values = {
        "reward/total": _mean(total),
        "reward/total_std": _mean(_group_std(total, group_size)),
        "reward/unscored_share": float(total.isnan().float().mean()),
        "zero_variance_share": float(zero_variance_groups(learned, group_size).float().mean()),
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
    for name in scores[0].parts:
        values[f"part/{name}"] = _mean(torch.cat([s.parts[name] for s in scores]))
    for name in scores[0].ratios:
        above, below = (torch.cat([s.ratios[name][side] for s in scores]) for side in (0, 1))
        # Means over the same samples: their quotient is the ratio of the sums.
        values[f"part/{name}"] = _mean(above) / _mean(below) if _mean(below) else 0.0
    return values


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
    near 0 is drowned by the others, whatever its weight, and one below 0 is worked against. Rows that a weighted reward
    leaves unscored do not count. Empty where no total differs within its group.

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


def _update_metrics(updates: list[UpdateMetrics]) -> dict[str, float]:
    last = updates[-1].means()
    values = {
        "loss": updates[-1].loss,
        "approx_kl": last["approx_kl"],
        "clip_fraction": last["clip_fraction"],
        "ratio/mean": last["ratio"],
        "ratio/first_max_abs_log": updates[0].max_abs_log_ratio,
        "grad_norm": updates[-1].grad_norm,
        "learning_rate": updates[-1].learning_rate,
    }
    if updates[-1].moved is not None:
        values["step_kl"] = updates[-1].moved
    first = updates[0].means()
    if SAMPLER_GAP in first:
        values[f"{SAMPLER_GAP}/mean"], values[f"{SAMPLER_GAP}/max"] = first[SAMPLER_GAP], updates[0].max_sampler_gap
    if "kl" in last:  # A KL that was not measured is no KL of 0.
        values["kl"] = last["kl"]
    for number, stats in enumerate(updates, 1):
        means = stats.means()
        values[f"update_{number}/ratio"] = means["ratio"]
        values[f"update_{number}/clip_fraction"] = means["clip_fraction"]
        values[f"update_{number}/grad_norm"] = stats.grad_norm
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
    """Mean over scored values; 0 if there is none, since a metric must be a number."""
    scored = values[~values.isnan()]
    return float(scored.double().mean()) if len(scored) else 0.0
