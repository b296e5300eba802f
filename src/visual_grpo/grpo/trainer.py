"""Group Relative Policy Optimization for any policy: sample, score, compare in groups, update.

The trainer sees neither pixels nor tokens: a `Policy` generates rollouts and replays them with gradient, a `Scorer`
scores the samples. Shapes: B rows in group-major order (N prompts x G samples), S decision steps of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from operator import index
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from visual_grpo.common.decisions import Likelihoods, Matches
from visual_grpo.common.errors import UserError
from visual_grpo.common.phases import alike, phase
from visual_grpo.common.types import Policy, PromptRecord, Scorer, StepMetrics, TrainBatch
from visual_grpo.config import GRPOConfig
from visual_grpo.grpo.advantages import USUAL_CLIP, combined_rewards, group_advantages
from visual_grpo.grpo.checkpoint import tensors_under
from visual_grpo.grpo.distributed import ranks
from visual_grpo.grpo.losses import LOSSES, average_decay
from visual_grpo.grpo.metrics import SAMPLER_GAP, Clock, UpdateMetrics, step_metrics
from visual_grpo.grpo.optimizer import AdapterOptimizer, non_finite
from visual_grpo.grpo.policy_loss import PolicyLoss, conflicts, refuse_unfit
from visual_grpo.grpo.ratio_check import check_ratio
from visual_grpo.grpo.sampling import PromptOrder, ScoredRollout, informative_groups, require_scored, sample_and_score
from visual_grpo.grpo.weight_average import WeightAverage

T = TypeVar("T")


class GRPOTrainer(Generic[T]):
    """Trains ``policy`` on ``scorer``'s total reward; ``fit`` yields one StepMetrics per training step."""

    def __init__(
        self,
        policy: Policy[T],
        scorer: Scorer,
        config: GRPOConfig,
        *,
        seed: int = 0,
        module: str = "policy",
    ) -> None:
        """The policy's ``dtype``, its weights' dtype, decides on loss scaling and on the floor of the ratio check.

        Raises UserError for settings that exclude each other (`policy_loss.conflicts`).
        """
        self.policy, self.scorer, self.config, self.seed, self.module = policy, scorer, config, index(seed), module
        self.dtype: str = getattr(policy, "dtype", "float32")
        if problem := next(conflicts(config, module, self.dtype), None):
            raise UserError(problem)
        self.parameters = policy.trainable_parameters()
        self.device, self.replay_is_old = self.parameters[0].device, config.replays(self.dtype)
        self.optimizer = AdapterOptimizer(self.parameters, config, self.dtype)
        decay = average_decay(config)
        self.average = WeightAverage(self.parameters, decay) if decay else None
        self.average_samples = self.average is not None and LOSSES[config.loss].average_samples
        self._ratio_checked = False
        self.generator = torch.Generator().manual_seed(self.seed)
        self.step = 0
        self.positions: dict[str, int] = {}

    @property
    def modules(self) -> dict[str, GRPOTrainer[Any]]:
        """The modules. Not stored: a reference cycle would delay freeing the model's GPU memory."""
        return {self.module: self}

    def fit(self, prompts: Sequence[PromptRecord]) -> Iterator[StepMetrics]:
        """Trains from ``self.step`` on until ``config.steps``; stop iterating to stop training."""
        order = PromptOrder(prompts, self.seed, self.positions)
        while self.step < self.config.steps:
            yield self.take_step(prompts, order)

    def take_step(self, prompts: Sequence[PromptRecord], order: PromptOrder) -> StepMetrics:
        """Rolls out and scores the next prompts, compares the samples of each, and updates the policy."""
        clock = Clock(device=str(self.device))
        scored: list[ScoredRollout[T]] = []
        missing = self.config.prompts_per_step
        for _ in range(1 + self.config.max_refills):
            chosen = [prompts[i] for i in order.take(missing)]
            with self.sampling_weights():
                scored += sample_and_score(self.policy, self.scorer, chosen, self.config, self.generator, clock)
            informative, missing = informative_groups(scored, self.config)
            if not missing:
                break
        self.positions = dict(order.positions)
        return self.update(informative, scored, clock)

    def sampling_weights(self) -> AbstractContextManager[None]:
        """Inside the block, the policy has the weights that generate its samples."""
        return self.average.in_place() if self.average and self.average_samples else nullcontext()

    def update(
        self, informative: Sequence[ScoredRollout[T]], scored: Sequence[ScoredRollout[T]], clock: Clock
    ) -> StepMetrics:
        """Takes all updates of a step on the informative groups of its rollouts; counts the step."""
        config, optimizer, region = self.config, self.optimizer, self.optimizer.trust_region
        batches, step, updates = self.build_batches(informative), self.step + 1, list[UpdateMetrics]()
        trained_sampled = not self.average_samples or not self.step
        if self.average is not None and not self.average_samples:
            with clock.timed("update"):
                batches = self._with_average_velocities(batches, self.average)
        for number in range(config.updates_per_rollout):
            taken, stats = [batch.of_update(number) for batch in batches], UpdateMetrics()
            # The weights are still those that sampled.
            on_policy = trained_sampled and all(earlier.skipped for earlier in updates)
            marks = phase(f"{self.module}: replay and gradient")
            with clock.timed("update"), marks, optimizer.skipping_non_finite(stats):
                self._add_gradients(taken, stats, on_policy=on_policy)
                if on_policy and not updates and not self._ratio_checked:
                    rounding = max(batch.rollout.rounding for batch in batches)
                    mean_gap = stats.means()[SAMPLER_GAP]
                    check_ratio(mean_gap, stats.max_gap, self.dtype, rounding, config.ratio_tolerance)
                    self._ratio_checked = True
                if region is not None and on_policy:
                    region.begin(partial(self._moved, taken))
                prompts = [name for batch in batches for name in batch.prompt_ids(batch.rows)]
                done = self.step * config.updates_per_rollout + number
                stats.grad_norm, stats.learning_rate = optimizer.step(done, step, prompts)
            if region is not None and not stats.skipped:
                stats.moved = region.moved
            updates.append(stats)
        self.step = step
        if self.average is not None:
            self.average.follow(step * config.updates_per_rollout)
        drawn = [(part.rollout, part.scores) for part in scored]
        return step_metrics(step, drawn, batches, updates, clock, config, replays=self.replay_is_old)

    def _add_gradients(self, batches: Sequence[TrainBatch[T]], stats: UpdateMetrics, *, on_policy: bool) -> None:
        """Adds the gradient of the loss over the rows of all ranks to the parameters', and its metrics to ``stats``.

        Raises NonFiniteLossError if a loss is not finite on any rank.
        """
        policy_loss, own = PolicyLoss(self.config, batches), UpdateMetrics()
        with self.optimizer.gradient_sums():
            with ranks.gathering(own) as every_rank:
                for batch, rows, decisions in self.replay(batches, on_policy=on_policy):
                    loss, metrics, counted = policy_loss(decisions, batch, rows)
                    if on_policy:
                        own.record_gap(decisions.gap(), counted)
                    own.record(loss, metrics, counted)
                    if not math.isfinite(value := float(loss.detach())):
                        own.failure = non_finite(value, "loss", self.step + 1, batch.prompt_ids(rows))
                        break
                    self.optimizer.backward(loss)
            for rank in every_rank:
                stats.join(rank)
            if stats.failure is not None:
                raise stats.failure

    @torch.no_grad()
    def _with_average_velocities(self, batches: Sequence[TrainBatch[T]], average: WeightAverage) -> list[TrainBatch[T]]:
        """Fills in the velocities under the average of the weights, for the rows that this rank sampled."""
        filled = []
        with phase(f"{self.module}: average of the weights"), average.in_place(), ranks.gathering(None):
            for batch in batches:
                kept: Tensor | None = None
                for _, rows, decisions in self.replay([batch]):
                    refuse_unfit(self.config.loss, decisions)
                    velocity = cast(Matches, decisions).velocity
                    if kept is None:
                        kept = velocity.new_empty(batch.drawn, batch.rollout.mask.shape[1], *velocity.shape[2:])
                    kept[batch.drawn_place(decisions, rows)] = velocity
                filled.append(replace(batch, average_velocities=kept))
        return filled

    def replay(
        self, batches: Sequence[TrainBatch[T]], *, on_policy: bool = False
    ) -> Iterator[tuple[TrainBatch[T], Tensor, Likelihoods]]:
        """Yields micro-batches of the rows that this rank sampled, each with some of its decisions, recomputed.

        ``on_policy``: the weights are those that sampled. In half precision, where sampler and replay round apart, the
        log-probs of such a replay become the old ones (`GRPOConfig.replays`).
        """
        for batch in batches:
            for rows, places in alike(list(batch.micro_batches(self.config.micro_batch_size))):
                for decisions in self.policy.replay(batch.rollout.trajectory, places):
                    if on_policy and self.replay_is_old:
                        batch.old_log_probs[batch.place(decisions, rows)] = decisions.log_probs.detach()
                    yield batch, rows, batch.compared(decisions, rows)

    @torch.no_grad()
    def _moved(self, batches: Sequence[TrainBatch[T]]) -> float:
        """Returns the KL of the policy that sampled to the present one, from one sample of each prompt on all ranks."""
        firsts = []
        for batch in batches:
            groups = batch.rows // self.config.group_size
            firsts.append(replace(batch, rows=batch.rows[groups.diff(prepend=groups.new_tensor([-1])) > 0]))
        own = [0.0, 0.0]  # The sum over decisions, and their number.
        with ranks.gathering(own) as every_rank:
            for batch, rows, decisions in self.replay(firsts):
                counted = batch.rollout.mask[rows][:, decisions.steps]
                own[0] += float(torch.where(counted, decisions.moved(), 0.0).double().sum())
                own[1] += int(counted.sum())
        total, number = (sum(column) for column in zip(*every_rank, strict=True))
        return total / max(number, 1)

    def build_batches(self, scored: Sequence[ScoredRollout[T]]) -> list[TrainBatch[T]]:
        """Returns the rows to train on, each with its advantage over the mean of its prompt's scored samples."""
        config, size = self.config, self.config.group_size
        scored = [part for part in scored if len(part.groups)]
        rows = [(part.groups[:, None] * size + torch.arange(size)).reshape(-1) for part in scored]
        rewards = torch.cat([combined_rewards(part.scores, config)[r] for part, r in zip(scored, rows, strict=True)])
        usual = LOSSES[config.loss].advantage_scale if config.combine == "sum" else "batch_centred"
        scale = config.advantage_scale or usual
        clip = config.advantage_clip or (None if scale == "none" else USUAL_CLIP)
        advantages = group_advantages(rewards, size, scale=scale, epsilon=config.advantage_epsilon, clip=clip)
        batches = []
        lengths = [len(chosen) for chosen in rows]
        parts = zip(scored, rows, rewards.split(lengths), advantages.split(lengths), strict=True)
        for (rollout, rollout_scores, _), chosen, row_rewards, row_advantages in parts:
            batch = TrainBatch(
                rollout=rollout,
                scores=rollout_scores,
                rows=chosen[~row_rewards.isnan()],
                advantages=torch.zeros(len(rollout_scores.total)).index_put((chosen,), row_advantages),
                old_log_probs=rollout.log_probs.clone() if self.replay_is_old else rollout.log_probs,
            )
            if len(batch.rows):
                batches.append(batch)
        require_scored(batches, [part.scores for part in scored], self.step + 1)
        return batches

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns what a bit-exact continuation needs between two steps: tensors, and metadata that are JSON."""
        tensors = {f"adapter/{k}": v for k, v in self.policy.adapter_state_dict().items()}
        moments, metadata = self.optimizer.state()
        tensors |= {f"optimizer/{k}": v for k, v in moments.items()}
        if self.average is not None:
            tensors |= {f"average/{k}": v for k, v in self.average.state().items()}
        tensors["rng/trainer"] = self.generator.get_state()
        return tensors, {"step": self.step, "positions": self.positions} | metadata

    def load_state(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        self.policy.load_adapter_state_dict(tensors_under("adapter", tensors))
        self.optimizer.load_state(tensors_under("optimizer", tensors), metadata)
        if self.average is not None:
            self.average.load_state(tensors_under("average", tensors))
        self.generator.set_state(tensors["rng/trainer"])
        self.step, self.positions = metadata["step"], dict(metadata["positions"])
