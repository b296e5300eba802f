"""The loss of one optimiser update, and sums of its gradient over chunks, micro-batches and processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor, nn

from visual_grpo.common.errors import UserError
from visual_grpo.common.types import ReplayChunk, Rollout, Scores
from visual_grpo.config import GRPOConfig
from visual_grpo.grpo import losses

T = TypeVar("T")
SAMPLER_GAP = "sampler_gap"


@dataclass(frozen=True, kw_only=True)
class Experience(Generic[T]):
    """The rows of a rollout that are trained on, with their advantages."""

    rollout: Rollout[T]
    scores: Scores
    rows: Tensor
    """[b] int64, rows of the rollout; unscored rows are not among them."""
    advantages: Tensor
    """[B] float32 for all rows of the rollout."""
    replayed_log_probs: Tensor | None = None
    """[B, S] float32: of the policy that sampled, by the replay that is trained with; None = the sampler's own."""

    @property
    def old_log_probs(self) -> Tensor:
        """[B, S] float32, the denominator of the ratio."""
        return self.rollout.log_probs if self.replayed_log_probs is None else self.replayed_log_probs

    def anchor(self, chunk: ReplayChunk, rows: Tensor, stats: UpdateStats) -> None:
        """Keeps a replay of ``rows`` ([b]) under the weights that sampled them; notes how far the sampler was off."""
        assert self.replayed_log_probs is not None
        replayed, counted = chunk.log_probs.detach(), self.rollout.mask[rows][:, chunk.steps]
        gap = torch.where(counted, replayed - self.rollout.log_probs[rows][:, chunk.steps], 0.0).abs()
        stats.add(SAMPLER_GAP, gap, counted)
        stats.max_sampler_gap = max(stats.max_sampler_gap, float(gap.max()))
        self.replayed_log_probs[rows[:, None], torch.arange(chunk.steps.start, chunk.steps.stop)] = replayed


def prompt_ids(experience: Experience[Any], rows: Tensor) -> list[str]:
    return [experience.rollout.prompts[int(row)].id for row in rows]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The configured loss with the counts of the whole batch that normalise it."""

    config: GRPOConfig
    kind: losses.LossKind
    clip_low: float
    clip_high: float
    counted_rows: int
    counted_steps: int
    rows: int

    @classmethod
    def of(cls, config: GRPOConfig, experiences: Sequence[Experience]) -> Objective:
        kind = losses.LOSSES[config.loss]
        masks = [e.rollout.mask[e.rows] for e in experiences]
        return cls(
            config=config,
            kind=kind,
            clip_low=config.clip_low if config.clip_low is not None else kind.clip_low,
            clip_high=config.clip_high if config.clip_high is not None else kind.clip_high,
            counted_rows=sum(int(mask.any(1).sum()) for mask in masks),
            counted_steps=sum(int(mask.sum()) for mask in masks),
            rows=sum(len(mask) for mask in masks),
        )


@dataclass
class UpdateStats:
    """Sums over counted steps; a mean is taken only at the end."""

    steps: int = 0
    loss: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    max_abs_log_ratio: float = 0.0
    max_sampler_gap: float = 0.0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    skipped: bool = False
    """True if nothing was updated, because the loss or its gradient was not finite."""

    def add(self, name: str, values: Tensor, mask: Tensor) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + float((values * mask).double().sum())

    def join(self, other: UpdateStats) -> None:
        """Adds what another rank found of its rows."""
        self.steps, self.loss = self.steps + other.steps, self.loss + other.loss
        self.sums = {name: self.sums.get(name, 0.0) + other.sums.get(name, 0.0) for name in {**self.sums, **other.sums}}
        self.max_abs_log_ratio = max(self.max_abs_log_ratio, other.max_abs_log_ratio)
        self.max_sampler_gap = max(self.max_sampler_gap, other.max_sampler_gap)

    def distance_to_sampler(self) -> tuple[float, float]:
        """Mean and largest |log ratio|, in nats, of the first update's replay to the sampler."""
        means = self.means()
        if SAMPLER_GAP in means:
            return means[SAMPLER_GAP], self.max_sampler_gap
        return means["abs_log_ratio"], self.max_abs_log_ratio

    def means(self) -> dict[str, float]:
        return {name: total / max(self.steps, 1) for name, total in self.sums.items()}


def chunk_loss(
    chunk: ReplayChunk, experience: Experience, rows: Tensor, objective: Objective, stats: UpdateStats
) -> Tensor:
    """This chunk's share of the batch's loss, a scalar with gradient; adds to ``stats``.

    Args:
        chunk: log-probs [b, s] of ``rows`` under the current policy.
        rows: [b] rows of the experience's rollout.
    """
    config, mask = objective.config, experience.rollout.mask[rows]
    old, counted = experience.old_log_probs[rows][:, chunk.steps], mask[:, chunk.steps]
    advantages = experience.advantages[rows]
    weights = losses.step_weights(
        mask,
        objective.kind.aggregation,
        counted_rows=objective.counted_rows,
        counted_steps=objective.counted_steps,
        rows=objective.rows,
    )[:, chunk.steps]
    if objective.kind.sequence_ratio:
        if old.shape[1] != mask.shape[1]:
            raise ValueError("gspo needs all steps of a row in one chunk; this policy replays them apart")
        ratio = losses.sequence_ratio(chunk.log_probs, old, counted)
    else:
        ratio = losses.importance_ratio(chunk.log_probs, old)
    loss = losses.clipped_surrogate(ratio, advantages, objective.clip_low, objective.clip_high)
    if config.kl_weight:
        if (kl := chunk.kl) is None:
            raise UserError(
                f"kl_weight is {config.kl_weight:g}, but the policy's replay gives no KL to its reference. Make the"
                " policy with it, as load_policy(..., kl_reference=True) does, or set kl_weight to 0."
            )
        if config.kl_correction:
            kl = kl * losses.importance_ratio(chunk.log_probs, old)
        loss = loss + config.kl_weight * kl
    if config.sampler_correction is not None:
        drawn = experience.rollout.log_probs[rows][:, chunk.steps]
        loss = loss * losses.truncated_importance_weights(old, drawn, config.sampler_correction)
    # Uncounted steps may hold anything, even inf: where() keeps them out of value and gradient.
    total = torch.where(counted, weights * loss, 0.0).sum()
    with torch.no_grad():
        stats.steps += int(counted.sum())
        stats.loss += float(total)
        log_ratio = torch.where(counted, chunk.log_probs - old, 0.0)
        clipped = losses.clipped_away(ratio, advantages, objective.clip_low, objective.clip_high)
        stats.add("ratio", torch.where(counted, ratio, 0.0), counted)
        stats.add("abs_log_ratio", log_ratio.abs(), counted)
        stats.add("clip_fraction", clipped.float(), counted)
        # k3 of the old policy against the new one: how far this rollout's updates have moved it.
        stats.add("approx_kl", losses.k3(log_ratio), counted)
        if chunk.kl is not None:
            stats.add("kl", torch.where(counted, chunk.kl, 0.0), counted)
        stats.max_abs_log_ratio = max(stats.max_abs_log_ratio, float(log_ratio.abs().max()))
    return total


class GradientSums:
    """Adds up what backward passes leave in ``grad`` of ``parameters`` inside a ``with`` block.

    In float64 for those on a CPU: AdamW makes a whole step even of a gradient that nearly cancels, so that rounding
    would decide its direction, and another number of processes rounds elsewhere. On a GPU ``grad`` itself is the sum,
    in the parameter's precision: its memory is short, and its kernels do not repeat to the last bit anyway.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._hooks = [p.register_post_accumulate_grad_hook(self._take) for p in parameters if in_double(p)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Puts the sums, rounded once, into ``grad``."""
        for hook in self._hooks:
            hook.remove()
        for parameter, total in self._sums.items():
            parameter.grad = total.to(parameter.dtype)

    def reduce(self, total: Callable[[Tensor], object]) -> None:
        """Replaces each sum by that over all ranks; ``total`` adds a flat tensor up in place."""
        own = [self._sums.get(parameter, parameter.grad) for parameter in self._parameters]
        like = [parameter.double() if in_double(parameter) else parameter for parameter in self._parameters]
        parts = [torch.zeros_like(p).detach() if g is None else g for p, g in zip(like, own, strict=True)]
        there = parts[0].new_tensor([gradient is not None for gradient in own])
        flat = torch.cat([part.flatten() for part in (*parts, there)])
        total(flat)
        *sums, there = flat.split([part.numel() for part in (*parts, there)])
        for parameter, part, count in zip(self._parameters, sums, there, strict=True):
            if not count:  # No gradient reaches it: then the optimiser must not touch it.
                continue
            if in_double(parameter):
                self._sums[parameter] = part.view_as(parameter)
            else:
                parameter.grad = part.view_as(parameter)

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        if parameter in self._sums:
            self._sums[parameter].add_(parameter.grad)
        else:
            self._sums[parameter] = parameter.grad.double()
        parameter.grad = None


def in_double(parameter: nn.Parameter) -> bool:
    """True if its gradients are added up in float64."""
    return parameter.device.type == "cpu"
