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
from visual_grpo.grpo.advantages import gdpo_advantages, group_advantages, zero_variance_groups
from visual_grpo.grpo.losses import LOSSES
from visual_grpo.grpo.order import PromptOrder
from visual_grpo.grpo.rewinding import rewound_by_errors
from visual_grpo.grpo.schedule import learning_rate_factor
from visual_grpo.grpo.self_check import check_ratio
from visual_grpo.grpo.setbacks import MOST_OVERFLOWS, NonFiniteLossError, Setbacks, refuse_non_finite
from visual_grpo.grpo.unfinished import UnfinishedStep, unfinished_of, with_unfinished
from visual_grpo.grpo.update import Experience, Objective, UpdateStats, chunk_loss
from visual_grpo.types import Policy, PromptRecord, Rollout, Scorer, Scores, StepMetrics, begin_scoring

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
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay
        )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dtype == "float16")
        self.setbacks = Setbacks(config.non_finite)
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
                experiences, drawn = self._collect(prompts, order, clock)
            self.positions = dict(order.positions)
            self._unfinished = UnfinishedStep(experiences=experiences, drawn=drawn, clock=clock)
        return self.go_on()

    def learn(self, rollout: Rollout[T], scores: Scores, clock: metrics.Clock) -> StepMetrics:
        """The updates on a rollout that was made and scored elsewhere."""
        groups = torch.arange(len(rollout.samples) // self.config.group_size)
        experiences = self._experiences([(rollout, scores, groups)])
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
                step.updates.append(self._update(step.experiences, objective, len(step.updates)))
        self.step += 1
        self._unfinished = None
        return metrics.step_metrics(self.step, step.drawn, step.experiences, step.updates, step.clock, self.config)

    def policy_gradient(self, prompts: Sequence[PromptRecord], generator: torch.Generator) -> Tensor:
        """Flat gradient of the loss on one rollout of ``prompts``, which changes nothing; see `signal_check`."""
        parts = self._sample(prompts, metrics.Clock(device=str(self.device)), generator)
        size = self.config.group_size
        experiences = self._experiences(
            [(own, scores, torch.arange(len(own.samples) // size)) for own, scores in parts]
        )
        self._backward_without_overflow(experiences)
        gradients = [p.grad.flatten().float().cpu() for p in self.parameters if p.grad is not None]
        self.optimizer.zero_grad(set_to_none=True)
        return torch.cat(gradients)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything a bit-exact continuation needs: tensors, and facts that are JSON.

        Between two updates of a step that is also the rollout with its scores.

        Raises:
            CannotPackError: the policy's trajectory cannot be written; only between two updates.
        """
        tensors = {f"adapter/{k}": v for k, v in self.policy.adapter_state_dict().items()}
        optimizer = self.optimizer.state_dict()["state"]
        for index, entries in optimizer.items():
            tensors |= {f"optimizer/{index}/{k}": torch.as_tensor(v) for k, v in entries.items()}
        tensors["rng/trainer"] = self.generator.get_state()
        facts = {"step": self.step, "positions": self.positions, "scaler": self.scaler.state_dict()}
        facts["setbacks"] = self.setbacks.state()
        return with_unfinished(tensors, facts, self._unfinished, self.device)

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Restores what ``state`` gave."""
        split = _split_keys(tensors)
        self.policy.load_adapter_state_dict(split["adapter"])
        entries: dict[int, dict[str, Tensor]] = {}
        for key, value in split.get("optimizer", {}).items():
            index, name = key.split("/")
            entries.setdefault(int(index), {})[name] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": entries, "param_groups": groups})
        self.generator.set_state(split["rng"]["trainer"])
        self.scaler.load_state_dict(facts["scaler"])
        if "setbacks" in facts:  # Not in checkpoints of older versions.
            self.setbacks.load_state(facts["setbacks"])
        self.step, self.positions = facts["step"], dict(facts["positions"])
        self._unfinished = unfinished_of(tensors, facts, self.device)

    def _collect(
        self, prompts: Sequence[PromptRecord], order: PromptOrder, clock: metrics.Clock
    ) -> tuple[list[Experience[T]], list[metrics.Drawn]]:
        """Exactly ``prompts_per_step`` groups to train on, and everything that was drawn for them.

        DAPO's dynamic sampling (arXiv 2503.14476) replaces groups without variance up to
        ``max_refills`` times, and keeps them if it cannot.
        """
        size, wanted = self.config.group_size, self.config.prompts_per_step
        kept: list[tuple[Rollout[T], Scores, Tensor]] = []
        spare: list[tuple[Rollout[T], Scores, Tensor]] = []
        drawn: list[metrics.Drawn] = []
        count = 0
        for _ in range(1 + self.config.max_refills):
            chosen = [prompts[i] for i in order.draw(wanted - count)]
            for rollout, scores in self._sample(chosen, clock, self.generator):
                drawn.append((rollout, scores))
                constant = zero_variance_groups(scores.total, size)
                if not self.config.max_refills:
                    constant = torch.zeros_like(constant)
                for groups, store in ((~constant, kept), (constant, spare)):
                    if groups.any():
                        store.append((rollout, scores, groups.nonzero()[:, 0]))
                count += int((~constant).sum())
            if count == wanted:
                break
        for rollout, scores, groups in spare:
            take = groups[: wanted - count]
            if len(take):
                kept.append((rollout, scores, take))
                count += len(take)
        return self._experiences(kept), drawn

    def _sample(
        self, prompts: Sequence[PromptRecord], clock: metrics.Clock, generator: torch.Generator
    ) -> list[tuple[Rollout[T], Scores]]:
        """Rollouts of ``rollout_prompts`` prompts each; while one is drawn, the one before may be judged elsewhere."""
        size = self.config.rollout_prompts or len(prompts)
        done: list[tuple[Rollout[T], Scores]] = []
        begun: tuple[Rollout[T], Callable[[], Scores]] | None = None
        for start in range(0, len(prompts), size):
            with clock.phase("rollout"), torch.no_grad():
                rollout = self.policy.rollout(prompts[start : start + size], self.config.group_size, generator)
            with clock.phase("reward"):
                if begun is not None:
                    done.append((begun[0], begun[1]()))
                begun = rollout, begin_scoring(self.scorer, rollout.prompts, rollout.samples)
        if begun is not None:
            with clock.phase("reward"):
                done.append((begun[0], begun[1]()))
        return done

    def _experiences(self, kept: list[tuple[Rollout[T], Scores, Tensor]]) -> list[Experience[T]]:
        size = self.config.group_size
        rows = [(groups[:, None] * size + torch.arange(size)).reshape(-1) for _, _, groups in kept]
        advantages = self._advantages([scores for _, scores, _ in kept], rows)
        experiences = []
        parts = advantages.split([len(chosen) for chosen in rows])
        for (rollout, scores, _), chosen, own in zip(kept, rows, parts, strict=True):
            every = torch.zeros(len(scores.total))
            every[chosen] = own
            scored = chosen[~scores.total[chosen].isnan()]
            if len(scored):
                experiences.append(Experience(rollout=rollout, scores=scores, rows=scored, advantages=every))
        if not experiences:
            raise UserError(_nothing_scored(self.step + 1, [scores for _, scores, _ in kept]))
        return experiences

    def _advantages(self, scores: list[Scores], rows: list[Tensor]) -> Tensor:
        """[b] advantages of the chosen rows of all rollouts together."""
        config = self.config
        shared: dict[str, Any] = {"epsilon": config.advantage_epsilon, "clip": config.advantage_clip}
        if config.combine == "gdpo":
            rewards = {
                name: torch.cat([s.rewards[name][r] for s, r in zip(scores, rows, strict=True)])
                for name in scores[0].rewards
            }
            return gdpo_advantages(rewards, scores[0].weights, config.group_size, **shared)
        total = torch.cat([s.total[r] for s, r in zip(scores, rows, strict=True)])
        scale = config.advantage_scale or LOSSES[config.loss].advantage_scale
        return group_advantages(total, config.group_size, scale=scale, **shared)

    def _update(self, experiences: list[Experience[T]], objective: Objective, number: int) -> UpdateStats:
        """One optimiser update over all rows; none, where its loss or gradient is not finite and may be left out."""
        stats = UpdateStats()
        try:
            with rewound_by_errors(self.generator):
                self._try_update(experiences, objective, number, stats)
        except NonFiniteLossError as error:
            self.setbacks.left_out(error)
            stats.left_out, stats.grad_norm = True, math.nan
        else:
            self.setbacks.taken()
        return stats

    def _try_update(
        self, experiences: list[Experience[T]], objective: Objective, number: int, stats: UpdateStats
    ) -> None:
        self._backward(experiences, objective, stats)
        if number == 0 and not self._checked:  # Later ones are of another policy than the rollout.
            mean = stats.means()["abs_log_ratio"]
            check_ratio(mean, stats.max_abs_log_ratio, self.dtype, self.config.ratio_tolerance)
            self._checked = True
        self._optimise(stats, number, experiences)

    def _backward(self, experiences: list[Experience[T]], objective: Objective, stats: UpdateStats) -> None:
        """The gradient over all rows, micro-batch by micro-batch and chunk by chunk."""
        self.optimizer.zero_grad(set_to_none=True)
        for experience in experiences:
            for rows in experience.rows.split(self.config.micro_batch_size or len(experience.rows)):
                for chunk in self.policy.replay(experience.rollout.trajectory, rows):
                    loss = chunk_loss(chunk, experience, rows, objective, stats)
                    refuse_non_finite(float(loss.detach()), "loss", self.step + 1, _ids(experience, rows))
                    # The scaler keeps its factor beside the first loss, and an overflow is noted beside the gradient.
                    self.scaler.scale(loss.to(self.device)).backward()

    def _backward_without_overflow(self, experiences: list[Experience[T]]) -> None:
        """The gradient of no update. Float16's scale is halved until it can be held, and is then what it was before."""
        objective, before = Objective.of(self.config, experiences), self.scaler.state_dict()
        for _ in range(MOST_OVERFLOWS):
            self._backward(experiences, objective, UpdateStats())
            if not self.scaler.is_enabled():
                return
            self.scaler.unscale_(self.optimizer)
            self.scaler.update()
            if all(p.grad.isfinite().all() for p in self.parameters if p.grad is not None):
                break
        self.scaler.load_state_dict(before)

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
            refuse_non_finite(norm, "gradient norm", self.step + 1, [i for e in experiences for i in _ids(e, e.rows)])
        scale = self.scaler.get_scale()
        self.is_whole = False
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.is_whole = True
        self.setbacks.scaled(scale, self.scaler.get_scale(), self.step + 1)
        stats.grad_norm, stats.learning_rate = norm, config.learning_rate * factor


def _nothing_scored(step: int, scores: Sequence[Scores]) -> str:
    """Names the rewards that make every total missing."""
    weighted = [name for name, weight in scores[0].weights.items() if weight]
    silent = [name for name in weighted if all(own.rewards[name].isnan().all() for own in scores)]
    who = f"the reward{'s' * (len(silent) > 1)} {', '.join(silent)} scored none of them"
    between = f"each lacks a score of one of the rewards {', '.join(weighted)}"
    return (
        f"No sample of step {step} could be scored: {who if silent else between}, and without a score"
        " there is nothing to train on. Look at what the reward returns for these prompts, or set its weight to 0."
    )


def _ids(experience: Experience[Any], rows: Tensor) -> list[str]:
    return [experience.rollout.prompts[int(row)].id for row in rows]


def nothing() -> None:
    """The default of `Trainer.between_updates`."""


def _split_keys(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    split: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        head, tail = key.split("/", 1)
        split.setdefault(head, {})[tail] = value
    return split
