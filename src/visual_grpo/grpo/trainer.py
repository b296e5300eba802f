"""Group Relative Policy Optimization for any policy: sample, score, compare in groups, update.

The trainer sees neither pixels nor tokens. A policy gives rollouts and replays them with gradient (``Policy``);
rewards are a callable (``Scorer``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from visual_grpo.common.types import Policy, PromptRecord, Rollout, Scorer, Scores, StepMetrics
from visual_grpo.config import GRPOConfig
from visual_grpo.grpo import metrics
from visual_grpo.grpo.checks import MOST_OVERFLOWS, NonFiniteGuard, NonFiniteLossError, check_ratio, refuse_non_finite
from visual_grpo.grpo.collecting import Collector, PromptOrder
from visual_grpo.grpo.distributed import group
from visual_grpo.grpo.distributed.policy import local_part
from visual_grpo.grpo.optimisers import build_optimiser, learning_rate_factor, load_optimiser_state, optimiser_state
from visual_grpo.grpo.update import Experience, GradientSums, Objective, UpdateStats, chunk_loss, prompt_ids

T = TypeVar("T")


class GRPOTrainer(Generic[T]):
    """Trains ``policy`` on ``scorer``'s total reward; ``fit`` yields one StepMetrics per rollout."""

    def __init__(
        self,
        policy: Policy[T],
        scorer: Scorer,
        config: GRPOConfig,
        *,
        seed: int = 0,
        dtype: str = "float32",
        module: str = "policy",
    ) -> None:
        """``dtype`` is that of the weights: float16 gets a gradient scaler, and the ratio self-check its floor."""
        self.policy, self.scorer, self.config, self.seed, self.dtype = policy, scorer, config, seed, dtype
        self._module = module
        self.parameters = policy.trainable_parameters()
        self.device = self.parameters[0].device
        self.optimizer = build_optimiser(self.parameters, config)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dtype == "float16")
        self.guard = NonFiniteGuard(config.non_finite)
        self._collector = Collector(policy, scorer, config, replayed=config.replays(dtype))
        self.generator = torch.Generator().manual_seed(seed)
        self.step = 0
        self.positions: dict[str, int] = {}
        self._checked = False

    @property
    def modules(self) -> dict[str, GRPOTrainer[Any]]:
        """Built on each call: a stored reference to itself would keep model and optimiser alive."""
        return {self._module: self}

    def fit(self, prompts: Sequence[PromptRecord]) -> Iterator[StepMetrics]:
        """Trains from ``self.step`` on until ``config.steps``; stop iterating to stop training."""
        order = PromptOrder.over(prompts, self.seed, self.positions)
        while self.step < self.config.steps:
            yield self.take_step(prompts, order)

    def take_step(self, prompts: Sequence[PromptRecord], order: PromptOrder) -> StepMetrics:
        """One rollout of the next prompts, and the updates on it."""
        clock = metrics.Clock(device=str(self.device))
        experiences, drawn = self._collector.collect(prompts, order, clock, self.generator, self.step + 1)
        self.positions = dict(order.positions)
        return self.update(experiences, drawn, clock)

    def learn(self, rollout: Rollout[T], scores: Scores, clock: metrics.Clock) -> StepMetrics:
        """The updates on a rollout that was made and scored elsewhere."""
        experiences = self._collector.all_groups([(rollout, scores)], self.step + 1)
        return self.update(experiences, [(rollout, scores)], clock)

    def policy_gradient(self, prompts: Sequence[PromptRecord], generator: torch.Generator) -> Tensor:
        """Flat gradient of the loss on one rollout of ``prompts``, float32 on the CPU; changes nothing.

        Float16's scale is halved until it can hold the gradient, and is then what it was before.
        """
        drawn = self._collector.sample(prompts, metrics.Clock(device=str(self.device)), generator)
        experiences = self._collector.all_groups(drawn, self.step + 1)
        objective, scale = Objective.of(self.config, experiences), self.scaler.state_dict()
        for _ in range(MOST_OVERFLOWS):
            self._compute_gradient(experiences, objective, UpdateStats(), first=True)
            if not self.scaler.is_enabled():
                break
            self.scaler.unscale_(self.optimizer)
            self.scaler.update()
            if all(p.grad.isfinite().all() for p in self.parameters if p.grad is not None):
                break
        self.scaler.load_state_dict(scale)
        flat = torch.cat([p.grad.flatten().float().cpu() for p in self.parameters if p.grad is not None])
        self.optimizer.zero_grad(set_to_none=True)
        return flat

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything a bit-exact continuation needs between two steps: tensors, and facts that are JSON."""
        tensors = {f"adapter/{k}": v for k, v in self.policy.adapter_state_dict().items()}
        tensors |= {f"optimizer/{k}": v for k, v in optimiser_state(self.optimizer).items()}
        tensors["rng/trainer"] = self.generator.get_state()
        facts = {"step": self.step, "positions": self.positions, "scaler": self.scaler.state_dict()}
        return tensors, facts | {"guard": self.guard.state()}

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Restores what ``state`` gave."""
        self.policy.load_adapter_state_dict(under("adapter", tensors))
        load_optimiser_state(self.optimizer, under("optimizer", tensors))
        self.generator.set_state(tensors["rng/trainer"])
        self.scaler.load_state_dict(facts["scaler"])
        self.guard.load_state(facts["guard"])
        self.step, self.positions = facts["step"], dict(facts["positions"])

    def update(self, experiences: list[Experience[T]], drawn: list[metrics.Drawn], clock: metrics.Clock) -> StepMetrics:
        """All optimiser updates of a step on its experiences."""
        objective = Objective.of(self.config, experiences)
        updates: list[UpdateStats] = []
        for _ in range(self.config.updates_per_rollout):
            with clock.phase("update"):
                updates.append(self._update(experiences, updates, objective))
        self.step += 1
        return metrics.step_metrics(self.step, drawn, experiences, updates, clock, self.config)

    def _update(
        self, experiences: list[Experience[T]], before: Sequence[UpdateStats], objective: Objective
    ) -> UpdateStats:
        """One optimiser update over all rows; none, where its loss or gradient is not finite and may be skipped."""
        stats = UpdateStats()
        try:
            self._compute_gradient(experiences, objective, stats, first=all(update.skipped for update in before))
            if not before and not self._checked:  # Later ones are of another policy than the rollout.
                expected = max(experience.rollout.rounding for experience in experiences)
                check_ratio(*stats.distance_to_sampler(), self.dtype, expected, self.config.ratio_tolerance)
                self._checked = True
            self._optimise(stats, len(before), experiences)
        except NonFiniteLossError as error:
            self.guard.skipped(error)
            stats.skipped, stats.grad_norm = True, math.nan
        else:
            self.guard.in_a_row = 0
        self.optimizer.zero_grad(set_to_none=True)  # Free gradients before the next rollout.
        return stats

    def _compute_gradient(
        self, experiences: list[Experience[T]], objective: Objective, stats: UpdateStats, *, first: bool
    ) -> None:
        """Leaves the gradient over all ranks' rows, times the scaler's factor, in ``grad``; adds to ``stats``.

        ``first``: the weights are those that sampled, so that every ratio is 1. Raises NonFiniteLossError.
        """
        self.optimizer.zero_grad(set_to_none=True)
        with GradientSums(self.parameters) as sums:
            found = group.everyone(lambda: self._backward(experiences, objective, first))
            for own, _ in found:
                stats.join(own)
            for _, error in found:
                if error is not None:
                    raise error
            if group.count() > 1:
                sums.reduce(group.total)

    def _backward(
        self, experiences: list[Experience[T]], objective: Objective, first: bool
    ) -> tuple[UpdateStats, NonFiniteLossError | None]:
        """Adds up the gradients of the rows that this rank has drawn, until a loss is not finite."""
        stats = UpdateStats()
        # A rank without a row needs its scaler's factor too, which is made where its first loss is.
        self.scaler.scale(torch.zeros((), device=self.device))
        for experience in experiences:
            part = local_part(experience.rollout)
            rows = part.among(experience.rows)
            for batch in rows.split(self.config.micro_batch_size or max(1, len(rows))) if len(rows) else ():
                for chunk in self.policy.replay(part.trajectory, batch - part.start):
                    if first and experience.replayed_log_probs is not None:
                        experience.anchor(chunk, batch, stats)
                    loss = chunk_loss(chunk, experience, batch, objective, stats)
                    try:
                        refuse_non_finite(float(loss.detach()), "loss", self.step + 1, prompt_ids(experience, batch))
                    except NonFiniteLossError as error:
                        return stats, error
                    self.scaler.scale(loss.to(self.device)).backward()
        return stats, None

    def _optimise(self, stats: UpdateStats, number: int, experiences: list[Experience[T]]) -> None:
        config = self.config
        update = self.step * config.updates_per_rollout + number
        total = config.steps * config.updates_per_rollout
        factor = learning_rate_factor(update, total, config.warmup_steps, config.schedule)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = config.learning_rate * factor
        self.scaler.unscale_(self.optimizer)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, config.max_grad_norm))
        if not self.scaler.is_enabled():  # With a scaler an infinite gradient skips the update by design.
            prompts = [name for experience in experiences for name in prompt_ids(experience, experience.rows)]
            refuse_non_finite(norm, "gradient norm", self.step + 1, prompts)
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.guard.scaled(scale, self.scaler.get_scale(), self.step + 1)
        stats.grad_norm, stats.learning_rate = norm, config.learning_rate * factor


def under(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The ``tensors`` whose keys begin with ``name/``, without it."""
    start = f"{name}/"
    return {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}
