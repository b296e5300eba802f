"""Group Relative Policy Optimization for any policy: sample, score, compare in groups, update.

The trainer sees neither pixels nor tokens: a `Policy` draws rollouts and replays them with gradient, a `Scorer` judges
the samples. Shapes: B rows in group-major order (N prompts x G samples), S decision steps of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from visual_grpo.common.errors import UserError
from visual_grpo.common.types import Policy, PromptRecord, ReplayChunk, Rollout, Scorer, Scores, StepMetrics, TrainBatch
from visual_grpo.config import GRPOConfig
from visual_grpo.grpo.checks import check_ratio
from visual_grpo.grpo.distributed import group
from visual_grpo.grpo.distributed.policy import local_part
from visual_grpo.grpo.losses import LOSSES, PolicyLoss, gdpo_advantages, group_advantages
from visual_grpo.grpo.metrics import Clock, UpdateMetrics, step_metrics
from visual_grpo.grpo.optimizer import (
    MOST_OVERFLOWS,
    GradientSums,
    NonFiniteGuard,
    NonFiniteLossError,
    build_optimizer,
    learning_rate_factor,
    load_optimizer_state,
    optimizer_state,
    refuse_non_finite,
)
from visual_grpo.grpo.sampling import PromptOrder, ScoredGroups, all_groups, informative_groups, sample_and_score

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
        self.optimizer = build_optimizer(self.parameters, config)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dtype == "float16")
        self.guard = NonFiniteGuard(config.non_finite)
        self.generator = torch.Generator().manual_seed(seed)
        self.step = 0
        self.positions: dict[str, int] = {}
        self._ratio_checked = False

    @property
    def modules(self) -> dict[str, GRPOTrainer[Any]]:
        """Built on each call: a stored reference to itself would keep model and optimizer alive."""
        return {self._module: self}

    def fit(self, prompts: Sequence[PromptRecord]) -> Iterator[StepMetrics]:
        """Trains from ``self.step`` on until ``config.steps``; stop iterating to stop training."""
        order = PromptOrder.over(prompts, self.seed, self.positions)
        while self.step < self.config.steps:
            yield self.take_step(prompts, order)

    def take_step(self, prompts: Sequence[PromptRecord], order: PromptOrder) -> StepMetrics:
        """Samples and scores the next prompts, compares the samples of each, and updates the policy."""
        clock = Clock(device=str(self.device))
        scored: list[tuple[Rollout[T], Scores]] = []

        def draw(count: int) -> list[tuple[Rollout[T], Scores]]:
            rollouts = self._sample([prompts[i] for i in order.draw(count)], self.generator, clock)
            scored.extend(rollouts)
            return rollouts

        groups = informative_groups(draw, self.config)
        self.positions = dict(order.positions)
        return self.update(self.compare(groups), scored, clock)

    def learn(self, rollout: Rollout[T], scores: Scores, clock: Clock) -> StepMetrics:
        """Updates the policy on a rollout that was drawn and scored elsewhere."""
        scored = [(rollout, scores)]
        return self.update(self.compare(all_groups(scored, self.config.group_size)), scored, clock)

    def compare(self, groups: Sequence[ScoredGroups[T]]) -> list[TrainBatch[T]]:
        """Gives each sample its advantage over the other samples of its prompt, in all rollouts together.

        Raises:
            UserError: no sample is scored.
        """
        config, size = self.config, self.config.group_size
        groups = [part for part in groups if len(part[2])]
        rows = [(chosen[:, None] * size + torch.arange(size)).reshape(-1) for _, _, chosen in groups]
        scores = [scores for _, scores, _ in groups]
        limits: dict[str, Any] = {"epsilon": config.advantage_epsilon, "clip": config.advantage_clip}
        if config.combine == "gdpo":
            rewards = {
                name: torch.cat([s.rewards[name][r] for s, r in zip(scores, rows, strict=True)])
                for name in scores[0].rewards
            }
            advantages = gdpo_advantages(rewards, scores[0].weights, size, **limits)
        else:
            total = torch.cat([s.total[r] for s, r in zip(scores, rows, strict=True)])
            scale = config.advantage_scale or LOSSES[config.loss].advantage_scale
            advantages = group_advantages(total, size, scale=scale, **limits)
        batches = []
        parts = advantages.split([len(chosen) for chosen in rows])
        for (rollout, scored, _), chosen, part in zip(groups, rows, parts, strict=True):
            of_all_rows = torch.zeros(len(scored.total))
            of_all_rows[chosen] = part
            trained = chosen[~scored.total[chosen].isnan()]
            if len(trained):
                replayed = rollout.log_probs.clone() if config.replays(self.dtype) else None
                batches.append(
                    TrainBatch(
                        rollout=rollout,
                        scores=scored,
                        rows=trained,
                        advantages=of_all_rows,
                        replayed_log_probs=replayed,
                    )
                )
        if not batches:
            raise UserError(_nothing_scored(self.step + 1, scores))
        return batches

    def policy_gradient(self, prompts: Sequence[PromptRecord], generator: torch.Generator) -> Tensor:
        """Returns the flat gradient of the loss on one rollout of ``prompts``, float32 on the CPU; changes nothing.

        Float16's scale is halved until it can hold the gradient, and is restored afterwards.
        """
        scored = self._sample(prompts, generator, Clock(device=str(self.device)))
        batches = self.compare(all_groups(scored, self.config.group_size))
        loss, scale = PolicyLoss.over(self.config, batches), self.scaler.state_dict()
        for _ in range(MOST_OVERFLOWS):
            self._compute_gradient(batches, loss, UpdateMetrics(), first=True)
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
        """Returns what a bit-exact continuation needs between two steps: tensors, and facts that are JSON."""
        tensors = {f"adapter/{k}": v for k, v in self.policy.adapter_state_dict().items()}
        tensors |= {f"optimizer/{k}": v for k, v in optimizer_state(self.optimizer).items()}
        tensors["rng/trainer"] = self.generator.get_state()
        facts = {"step": self.step, "positions": self.positions, "scaler": self.scaler.state_dict()}
        return tensors, facts | {"guard": self.guard.state()}

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Restores what `state` returned."""
        self.policy.load_adapter_state_dict(under("adapter", tensors))
        load_optimizer_state(self.optimizer, under("optimizer", tensors))
        self.generator.set_state(tensors["rng/trainer"])
        self.scaler.load_state_dict(facts["scaler"])
        self.guard.load_state(facts["guard"])
        self.step, self.positions = facts["step"], dict(facts["positions"])

    def _sample(
        self, prompts: Sequence[PromptRecord], generator: torch.Generator, clock: Clock
    ) -> list[tuple[Rollout[T], Scores]]:
        return sample_and_score(self.policy, self.scorer, prompts, self.config, generator, clock)

    def update(
        self, batches: list[TrainBatch[T]], scored: Sequence[tuple[Rollout[T], Scores]], clock: Clock
    ) -> StepMetrics:
        """Takes all optimizer updates of a step."""
        loss = PolicyLoss.over(self.config, batches)
        updates: list[UpdateMetrics] = []
        for _ in range(self.config.updates_per_rollout):
            with clock.phase("update"):
                updates.append(self._update_once(batches, updates, loss))
        self.step += 1
        return step_metrics(self.step, scored, batches, updates, clock, self.config)

    def _update_once(
        self, batches: list[TrainBatch[T]], before: Sequence[UpdateMetrics], loss: PolicyLoss
    ) -> UpdateMetrics:
        """Takes one optimizer update over all rows; skips it where loss or gradient is not finite, if it may."""
        update = UpdateMetrics()
        try:
            self._compute_gradient(batches, loss, update, first=all(earlier.skipped for earlier in before))
            if not before and not self._ratio_checked:  # Later updates are of another policy than the rollout.
                rounding = max(batch.rollout.rounding for batch in batches)
                check_ratio(*update.log_ratio_stats(), self.dtype, rounding, self.config.ratio_tolerance)
                self._ratio_checked = True
            self._step_optimizer(update, len(before), batches)
        except NonFiniteLossError as error:
            self.guard.skipped(error)
            update.skipped, update.grad_norm = True, math.nan
        else:
            self.guard.in_a_row = 0
        self.optimizer.zero_grad(set_to_none=True)  # Free gradients before the next rollout.
        return update

    def _compute_gradient(
        self, batches: list[TrainBatch[T]], loss: PolicyLoss, update: UpdateMetrics, *, first: bool
    ) -> None:
        """Leaves the gradient over all ranks' rows, times the scaler's factor, in ``grad``; adds to ``update``.

        ``first``: the weights are those that sampled, so that every ratio is 1. Raises NonFiniteLossError.
        """
        self.optimizer.zero_grad(set_to_none=True)
        with GradientSums(self.parameters) as sums:
            results = group.everyone(lambda: self._backward(batches, loss, first))
            for metrics, _ in results:
                update.join(metrics)
            for _, error in results:
                if error is not None:
                    raise error
            if group.count() > 1:
                sums.reduce(group.total)

    def _backward(
        self, batches: list[TrainBatch[T]], policy_loss: PolicyLoss, first: bool
    ) -> tuple[UpdateMetrics, NonFiniteLossError | None]:
        """Accumulates the gradients of the rows that this rank has drawn, until a loss is not finite."""
        update = UpdateMetrics()
        # A rank without rows needs its scaler's factor too, which is created at the first loss.
        self.scaler.scale(torch.zeros((), device=self.device))
        for batch in batches:
            part = local_part(batch.rollout)
            rows = part.among(batch.rows)
            for micro in rows.split(self.config.micro_batch_size or max(1, len(rows))) if len(rows) else ():
                for chunk in self.policy.replay(part.trajectory, micro - part.start):
                    if first and batch.replayed_log_probs is not None:
                        _keep_replayed(batch.replayed_log_probs, batch, chunk, micro, update)
                    loss, metrics, counted = policy_loss(chunk, batch, micro)
                    update.record(loss, metrics, counted)
                    try:
                        refuse_non_finite(float(loss.detach()), "loss", self.step + 1, batch.prompt_ids(micro))
                    except NonFiniteLossError as error:
                        return update, error
                    self.scaler.scale(loss.to(self.device)).backward()
        return update, None

    def _step_optimizer(self, update: UpdateMetrics, number: int, batches: list[TrainBatch[T]]) -> None:
        config = self.config
        done = self.step * config.updates_per_rollout + number
        total = config.steps * config.updates_per_rollout
        factor = learning_rate_factor(done, total, config.warmup_steps, config.schedule)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = config.learning_rate * factor
        self.scaler.unscale_(self.optimizer)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, config.max_grad_norm))
        if not self.scaler.is_enabled():  # With a scaler an infinite gradient skips the update by design.
            prompts = [name for batch in batches for name in batch.prompt_ids(batch.rows)]
            refuse_non_finite(norm, "gradient norm", self.step + 1, prompts)
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.guard.scaled(scale, self.scaler.get_scale(), self.step + 1)
        update.grad_norm, update.learning_rate = norm, config.learning_rate * factor


def _keep_replayed(
    replayed: Tensor, batch: TrainBatch[Any], chunk: ReplayChunk, rows: Tensor, update: UpdateMetrics
) -> None:
    """Writes a replay of ``rows`` ([b]) under the sampling weights into ``replayed``, and records the sampler's gap."""
    log_probs, counted = chunk.log_probs.detach(), batch.rollout.mask[rows][:, chunk.steps]
    gap = torch.where(counted, log_probs - batch.rollout.log_probs[rows][:, chunk.steps], 0.0).abs()
    update.record_sampler_gap(gap, counted)
    replayed[rows[:, None], torch.arange(chunk.steps.start, chunk.steps.stop)] = log_probs


def _nothing_scored(step: int, scores: Sequence[Scores]) -> str:
    """Names the rewards that make every total missing."""
    weighted = [name for name, weight in scores[0].weights.items() if weight]
    silent = [name for name in weighted if all(s.rewards[name].isnan().all() for s in scores)]
    who = f"the reward{'s' * (len(silent) > 1)} {', '.join(silent)} scored none of them"
    between = f"each lacks a score of one of the rewards {', '.join(weighted)}"
    return (
        f"No sample of step {step} could be scored: {who if silent else between}, and without a score"
        " there is nothing to train on. Look at what the reward returns for these prompts, or set its weight to 0."
    )


def under(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The ``tensors`` whose keys begin with ``name/``, without it."""
    start = f"{name}/"
    return {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}
