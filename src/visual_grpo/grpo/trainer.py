"""Group Relative Policy Optimization for any policy: sample, score, compare in groups, update.

The trainer sees neither pixels nor tokens. A policy gives rollouts and replays them with gradient
(``types.Policy``); rewards are a callable (``types.Scorer``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from visual_grpo.config import GRPOConfig
from visual_grpo.errors import UserError
from visual_grpo.grpo import metrics
from visual_grpo.grpo.checks import NonFiniteLossError, Setbacks, check_ratio, refuse_non_finite
from visual_grpo.grpo.collecting import Collector
from visual_grpo.grpo.optimisers import build_optimiser, learning_rate_factor, load_optimiser_state, optimiser_state
from visual_grpo.grpo.order import PromptOrder
from visual_grpo.grpo.update import Experience, Gradient, Objective, UpdateStats, ids
from visual_grpo.types import Policy, PromptRecord, Rollout, Scorer, Scores, StepMetrics

T = TypeVar("T")


class Trainer(Protocol):
    """What a training run needs: `GRPOTrainer` for one module, or one of `two_stage`'s for both."""

    step: int
    seed: int

    @property
    def modules(self) -> Mapping[str, GRPOTrainer[Any]]:
        """Each trained module's own trainer."""
        ...

    def fit(self, prompts: Sequence[PromptRecord]) -> Iterator[StepMetrics]: ...

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]: ...

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None: ...


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
        """``module`` is the policy's name in messages. ``dtype`` is that of its weights: float16 gets a gradient
        scaler, and the ratio self-check its floor."""
        if config.group_size < 2:
            raise UserError(f"A group needs at least 2 samples to be compared, got group_size {config.group_size}.")
        self.policy, self.scorer, self.config, self.seed, self.dtype = policy, scorer, config, seed, dtype
        self._module = module
        self.parameters = policy.trainable_parameters()
        self.device = self.parameters[0].device
        self.optimizer = build_optimiser(self.parameters, config)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dtype == "float16")
        self.setbacks = Setbacks(config.non_finite)
        self._collector = Collector(policy, scorer, config, replayed=config.replays(dtype))
        self._gradient = Gradient(policy, config, self.optimizer, self.scaler, self.device)
        self.generator = torch.Generator().manual_seed(seed)
        self.step = 0
        self.positions: dict[str, int] = {}
        self._checked = False

    @property
    def modules(self) -> dict[str, GRPOTrainer[Any]]:
        """Built on each call: stored, this reference of the trainer to itself would keep model and optimiser alive."""
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
        experiences = self._collector.of_whole([(rollout, scores)], self.step + 1)
        return self.update(experiences, [(rollout, scores)], clock)

    def update(self, experiences: list[Experience[T]], drawn: list[metrics.Drawn], clock: metrics.Clock) -> StepMetrics:
        """All optimiser updates of a step on its experiences."""
        objective = Objective.of(self.config, experiences)
        updates: list[UpdateStats] = []
        for _ in range(self.config.updates_per_rollout):
            with clock.phase("update"):
                updates.append(self._update(experiences, updates, objective))
        self.step += 1
        return metrics.step_metrics(self.step, drawn, experiences, updates, clock, self.config)

    def policy_gradient(self, prompts: Sequence[PromptRecord], generator: torch.Generator) -> Tensor:
        """Flat gradient of the loss on one rollout of ``prompts``, which changes nothing; see `signal_check`."""
        drawn = self._collector.sample(prompts, metrics.Clock(device=str(self.device)), generator)
        return self._gradient.of_no_update(self._collector.of_whole(drawn, self.step + 1), self.step + 1)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything a bit-exact continuation needs between two steps: tensors, and facts that are JSON."""
        tensors = {f"adapter/{k}": v for k, v in self.policy.adapter_state_dict().items()}
        tensors |= {f"optimizer/{k}": v for k, v in optimiser_state(self.optimizer).items()}
        tensors["rng/trainer"] = self.generator.get_state()
        facts = {"step": self.step, "positions": self.positions, "scaler": self.scaler.state_dict()}
        facts["setbacks"] = self.setbacks.state()
        return tensors, facts

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Restores what ``state`` gave."""
        split = _split_keys(tensors)
        self.policy.load_adapter_state_dict(split["adapter"])
        load_optimiser_state(self.optimizer, split.get("optimizer", {}))
        self.generator.set_state(split["rng"]["trainer"])
        self.scaler.load_state_dict(facts["scaler"])
        self.setbacks.load_state(facts["setbacks"])
        self.step, self.positions = facts["step"], dict(facts["positions"])

    def _update(
        self, experiences: list[Experience[T]], before: Sequence[UpdateStats], objective: Objective
    ) -> UpdateStats:
        """One optimiser update over all rows; none, where its loss or gradient is not finite and may be left out."""
        stats = UpdateStats()
        try:
            self._try_update(experiences, before, objective, stats)
        except NonFiniteLossError as error:
            self.setbacks.left_out(error)
            stats.left_out, stats.grad_norm = True, math.nan
        else:
            self.setbacks.taken()
        # Gradients would take memory while the next samples are drawn.
        self.optimizer.zero_grad(set_to_none=True)
        return stats

    def _try_update(
        self,
        experiences: list[Experience[T]],
        before: Sequence[UpdateStats],
        objective: Objective,
        stats: UpdateStats,
    ) -> None:
        first = all(update.left_out for update in before)
        self._gradient.compute(experiences, objective, stats, self.step + 1, first=first)
        if not before and not self._checked:  # Later ones are of another policy than the rollout.
            expected = max(experience.rollout.rounding for experience in experiences)
            check_ratio(*stats.distance_to_sampler(), self.dtype, expected, self.config.ratio_tolerance)
            self._checked = True
        self._optimise(stats, len(before), experiences)

    def _optimise(self, stats: UpdateStats, number: int, experiences: list[Experience[T]]) -> None:
        config = self.config
        update = self.step * config.updates_per_rollout + number
        total = config.steps * config.updates_per_rollout
        factor = learning_rate_factor(update, total, config.warmup_steps, config.schedule) * self.setbacks.factor
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * factor
        self.scaler.unscale_(self.optimizer)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, config.max_grad_norm))
        if not self.scaler.is_enabled():  # With a scaler an infinite gradient skips the update by design.
            refuse_non_finite(norm, "gradient norm", self.step + 1, [i for e in experiences for i in ids(e, e.rows)])
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.setbacks.scaled(scale, self.scaler.get_scale(), self.step + 1)
        stats.grad_norm, stats.learning_rate = norm, config.learning_rate * factor


def _split_keys(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    split: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        head, tail = key.split("/", 1)
        split.setdefault(head, {})[tail] = value
    return split
