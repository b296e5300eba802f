"""Group Relative Policy Optimization for any policy: sample, score, compare in groups, update.

The trainer sees neither pixels nor tokens. A policy gives rollouts and replays them with gradient
(``types.Policy``); rewards are a callable (``types.Scorer``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from visual_grpo.config import GRPOConfig
from visual_grpo.errors import UserError
from visual_grpo.grpo import metrics
from visual_grpo.grpo.collecting import Collector
from visual_grpo.grpo.gradient import Gradient, ids
from visual_grpo.grpo.optimisers import build_optimiser, load_optimiser_state, optimiser_state
from visual_grpo.grpo.order import PromptOrder
from visual_grpo.grpo.rewinding import rewound_by_errors
from visual_grpo.grpo.schedule import learning_rate_factor
from visual_grpo.grpo.self_check import check_ratio
from visual_grpo.grpo.setbacks import NonFiniteLossError, Setbacks, refuse_non_finite
from visual_grpo.grpo.unfinished import UnfinishedStep, unfinished_of, with_unfinished
from visual_grpo.grpo.update import Experience, Objective, UpdateStats
from visual_grpo.types import Policy, PromptRecord, Rollout, Scorer, Scores, StepMetrics

T = TypeVar("T")


class Trainer(Protocol):
    """What a training run needs: `GRPOTrainer` for one module, or one of `two_stage`'s for both."""

    step: int
    seed: int
    between_updates: Callable[[], None]
    """Called between two optimiser updates of one step, where ``state`` may be asked for; it may raise to stop."""

    @property
    def modules(self) -> Mapping[str, GRPOTrainer[Any]]:
        """Each trained module's own trainer."""
        ...

    @property
    def updates_done(self) -> int:
        """Optimiser updates of the step that is not complete; 0 between two steps."""
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
        self.between_updates: Callable[[], None] = nothing
        self._unfinished: UnfinishedStep[T] | None = None
        self._checked = False
        self.is_whole = True
        """False only while the optimiser changes the weights: an error in between leaves them half changed."""

    @property
    def modules(self) -> dict[str, GRPOTrainer[Any]]:
        """Built on each call: stored, this reference of the trainer to itself would keep model and optimiser alive."""
        return {self._module: self}

    @property
    def updates_done(self) -> int:
        return 0 if self._unfinished is None else len(self._unfinished.updates)

    def fit(self, prompts: Sequence[PromptRecord]) -> Iterator[StepMetrics]:
        """Trains from ``self.step`` on until ``config.steps``; stop iterating to stop training."""
        order = PromptOrder.over(prompts, self.seed, self.positions)
        while self.step < self.config.steps:
            yield self.take_step(prompts, order)

    def take_step(self, prompts: Sequence[PromptRecord], order: PromptOrder) -> StepMetrics:
        """One rollout of the next prompts, and the updates on it; goes on with a step that is not complete."""
        if self._unfinished is None:
            clock = metrics.Clock(device=str(self.device))
            with rewound_by_errors(self.generator):
                experiences, drawn = self._collector.collect(prompts, order, clock, self.generator, self.step + 1)
            self.positions = dict(order.positions)
            self._unfinished = UnfinishedStep(experiences=experiences, drawn=drawn, clock=clock)
        return self.go_on()

    def learn(self, rollout: Rollout[T], scores: Scores, clock: metrics.Clock) -> StepMetrics:
        """The updates on a rollout that was made and scored elsewhere."""
        experiences = self._collector.of_whole([(rollout, scores)], self.step + 1)
        self._unfinished = UnfinishedStep(experiences=experiences, drawn=[(rollout, scores)], clock=clock)
        return self.go_on()

    def go_on(self) -> StepMetrics:
        """The updates that are still to be done on the rollout of a step that is not complete."""
        step = self._unfinished
        if step is None:
            raise ValueError("there is no step to go on with")
        objective = Objective.of(self.config, step.experiences)
        while len(step.updates) < self.config.updates_per_rollout:
            if step.updates:
                self.between_updates()
            with step.clock.phase("update"):
                step.updates.append(self._update(step, objective))
        self.step += 1
        self._unfinished = None
        return metrics.step_metrics(self.step, step.drawn, step.experiences, step.updates, step.clock, self.config)

    def policy_gradient(self, prompts: Sequence[PromptRecord], generator: torch.Generator) -> Tensor:
        """Flat gradient of the loss on one rollout of ``prompts``, which changes nothing; see `signal_check`."""
        drawn = self._collector.sample(prompts, metrics.Clock(device=str(self.device)), generator)
        return self._gradient.of_no_update(self._collector.of_whole(drawn, self.step + 1), self.step + 1)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything a bit-exact continuation needs: tensors, and facts that are JSON.

        Between two updates of a step that is also the rollout with its scores.

        Raises:
            CannotPackError: the policy's trajectory cannot be written; only between two updates.
        """
        tensors = {f"adapter/{k}": v for k, v in self.policy.adapter_state_dict().items()}
        tensors |= {f"optimizer/{k}": v for k, v in optimiser_state(self.optimizer).items()}
        tensors["rng/trainer"] = self.generator.get_state()
        facts = {"step": self.step, "positions": self.positions, "scaler": self.scaler.state_dict()}
        facts["setbacks"] = self.setbacks.state()
        return with_unfinished(tensors, facts, self._unfinished, self.device)

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Restores what ``state`` gave."""
        split = _split_keys(tensors)
        self.policy.load_adapter_state_dict(split["adapter"])
        load_optimiser_state(self.optimizer, split.get("optimizer", {}))
        self.generator.set_state(split["rng"]["trainer"])
        self.scaler.load_state_dict(facts["scaler"])
        if "setbacks" in facts:  # Not in checkpoints of older versions.
            self.setbacks.load_state(facts["setbacks"])
        self.step, self.positions = facts["step"], dict(facts["positions"])
        self._unfinished = unfinished_of(tensors, facts, self.device)

    def _update(self, step: UnfinishedStep[T], objective: Objective) -> UpdateStats:
        """One optimiser update over all rows; none, where its loss or gradient is not finite and may be left out."""
        stats = UpdateStats()
        try:
            with rewound_by_errors(self.generator):
                self._try_update(step, objective, stats)
        except NonFiniteLossError as error:
            self.setbacks.left_out(error)
            stats.left_out, stats.grad_norm = True, math.nan
        else:
            self.setbacks.taken()
        # Gradients would take memory while the next samples are drawn.
        self.optimizer.zero_grad(set_to_none=True)
        return stats

    def _try_update(self, step: UnfinishedStep[T], objective: Objective, stats: UpdateStats) -> None:
        first = all(update.left_out for update in step.updates)
        self._gradient.compute(step.experiences, objective, stats, self.step + 1, first=first)
        if not step.updates and not self._checked:  # Later ones are of another policy than the rollout.
            expected = max(experience.rollout.rounding for experience in step.experiences)
            check_ratio(*stats.distance_to_sampler(), self.dtype, expected, self.config.ratio_tolerance)
            self._checked = True
        self._optimise(stats, len(step.updates), step.experiences)

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
        self.is_whole = False
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.is_whole = True
        self.setbacks.scaled(scale, self.scaler.get_scale(), self.step + 1)
        stats.grad_norm, stats.learning_rate = norm, config.learning_rate * factor


def nothing() -> None:
    """The default of `Trainer.between_updates`."""


def _split_keys(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    split: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        head, tail = key.split("/", 1)
        split.setdefault(head, {})[tail] = value
    return split
