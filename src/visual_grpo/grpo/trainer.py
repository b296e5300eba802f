"""Group Relative Policy Optimization for any policy: sample, score, compare in groups, update.

The trainer sees neither pixels nor tokens: a `Policy` draws rollouts and replays them with gradient, a `Scorer` judges
the samples. Shapes: B rows in group-major order (N prompts x G samples), S decision steps of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from visual_grpo.common.phases import alike, phase
from visual_grpo.common.types import Policy, PromptRecord, Rollout, Scorer, Scores, StepMetrics, TrainBatch
from visual_grpo.config import GRPOConfig
from visual_grpo.grpo.checkpoint import tensors_under
from visual_grpo.grpo.distributed import ranks
from visual_grpo.grpo.losses import LOSSES, PolicyLoss, combined_rewards, group_advantages, k3
from visual_grpo.grpo.metrics import Clock, UpdateMetrics, step_metrics
from visual_grpo.grpo.optimizer import AdapterOptimizer, NonFiniteLossError, refuse_non_finite
from visual_grpo.grpo.ratio_check import check_ratio
from visual_grpo.grpo.sampling import (
    PromptOrder,
    ScoredRollout,
    informative_groups,
    require_scored,
    sample_and_score,
    with_all_groups,
)

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
        """The policy's ``dtype``, that of its weights, decides on loss scaling and on the floor of the ratio check."""
        self.policy, self.scorer, self.config, self.seed, self.module = policy, scorer, config, seed, module
        self.dtype: str = getattr(policy, "dtype", "float32")
        self.parameters = policy.trainable_parameters()
        self.device = self.parameters[0].device
        self.optimizer = AdapterOptimizer(self.parameters, config, self.dtype)
        self._ratio_checked = False
        self.generator = torch.Generator().manual_seed(seed)
        self.step = 0
        self.positions: dict[str, int] = {}

    @property
    def modules(self) -> dict[str, GRPOTrainer[Any]]:
        """Not stored: a reference cycle would delay freeing the model's GPU memory."""
        return {self.module: self}

    def fit(self, prompts: Sequence[PromptRecord]) -> Iterator[StepMetrics]:
        """Trains from ``self.step`` on until ``config.steps``; stop iterating to stop training."""
        order = PromptOrder(prompts, self.seed, self.positions)
        while self.step < self.config.steps:
            yield self.take_step(prompts, order)

    def take_step(self, prompts: Sequence[PromptRecord], order: PromptOrder) -> StepMetrics:
        """Samples and scores the next prompts, compares the samples of each, and updates the policy."""
        clock = Clock(device=str(self.device))
        scored: list[ScoredRollout[T]] = []

        def sample(count: int) -> list[ScoredRollout[T]]:
            chosen = [prompts[i] for i in order.take(count)]
            parts = sample_and_score(self.policy, self.scorer, chosen, self.config, self.generator, clock)
            scored.extend(parts)
            return parts

        informative = informative_groups(sample, self.config)
        self.positions = dict(order.positions)
        return self.update(self.build_batches(informative), scored, clock)

    def update_on(self, rollout: Rollout[T], scores: Scores, clock: Clock) -> StepMetrics:
        """Updates the policy on a rollout that was drawn and scored elsewhere."""
        scored = [with_all_groups(rollout, scores, self.config.group_size)]
        return self.update(self.build_batches(scored), scored, clock)

    def build_batches(self, scored: Sequence[ScoredRollout[T]]) -> list[TrainBatch[T]]:
        """Returns the rows to train on, each with its advantage over the mean of its prompt's scored samples."""
        config, size = self.config, self.config.group_size
        scored = [part for part in scored if len(part.groups)]
        rows = [(part.groups[:, None] * size + torch.arange(size)).reshape(-1) for part in scored]
        rewards = torch.cat([combined_rewards(part.scores, config)[r] for part, r in zip(scored, rows, strict=True)])
        usual = LOSSES[config.loss].advantage_scale if config.combine == "sum" else "batch_centred"
        advantages = group_advantages(
            rewards,
            size,
            scale=config.advantage_scale or usual,
            epsilon=config.advantage_epsilon,
            clip=config.advantage_clip,
        )
        batches = []
        lengths = [len(chosen) for chosen in rows]
        parts = zip(scored, rows, rewards.split(lengths), advantages.split(lengths), strict=True)
        for (rollout, rollout_scores, _), chosen, row_rewards, row_advantages in parts:
            batch = TrainBatch(
                rollout=rollout,
                scores=rollout_scores,
                rows=chosen[~row_rewards.isnan()],
                advantages=torch.zeros(len(rollout_scores.total)).index_put((chosen,), row_advantages),
                replayed_log_probs=rollout.log_probs.clone() if config.replays(self.dtype) else None,
            )
            if len(batch.rows):
                batches.append(batch)
        require_scored(batches, [part.scores for part in scored], self.step + 1)
        return batches

    def update(self, batches: list[TrainBatch[T]], scored: Sequence[ScoredRollout[T]], clock: Clock) -> StepMetrics:
        """Takes all optimizer updates of a step."""
        policy_loss = PolicyLoss(self.config, batches)
        updates: list[UpdateMetrics] = []
        for _ in range(self.config.updates_per_rollout):
            with clock.phase("update"), phase(f"{self.module}: replay and gradient"):
                updates.append(self._update_once(batches, updates, policy_loss))
        self.step += 1
        rollouts, scores, _ = zip(*scored, strict=True)
        return step_metrics(self.step, rollouts, scores, batches, updates, clock, self.config)

    def _update_once(
        self, batches: list[TrainBatch[T]], before: Sequence[UpdateMetrics], policy_loss: PolicyLoss
    ) -> UpdateMetrics:
        metrics = UpdateMetrics()
        unchanged = all(earlier.skipped for earlier in before)  # The weights are still those that sampled.
        with self.optimizer.skipping_non_finite(metrics):
            self.compute_gradient(batches, policy_loss, metrics, on_policy=unchanged)
            if not before and not self._ratio_checked:  # Later updates are of another policy than the rollout.
                rounding = max(batch.rollout.rounding for batch in batches)
                check_ratio(*metrics.log_ratio_stats(), self.dtype, rounding, self.config.ratio_tolerance)
                self._ratio_checked = True
            if unchanged and self.optimizer.trust_region is not None:
                self.optimizer.trust_region.begin(partial(self._moved, batches))
            number = self.step * self.config.updates_per_rollout + len(before)
            prompts = [name for batch in batches for name in batch.prompt_ids(batch.rows)]
            metrics.grad_norm, metrics.learning_rate = self.optimizer.step(number, self.step + 1, prompts)
        if self.optimizer.trust_region is not None and not metrics.skipped:
            metrics.moved = self.optimizer.trust_region.moved
        return metrics

    def compute_gradient(
        self, batches: list[TrainBatch[T]], policy_loss: PolicyLoss, metrics: UpdateMetrics, *, on_policy: bool
    ) -> None:
        """Fills ``grad`` with the gradient summed over all ranks, times the loss scale; adds to ``metrics``.

        ``on_policy``: the weights are those that sampled. Raises NonFiniteLossError.
        """
        with self.optimizer.gradient_sums() as sums:
            results = ranks.all_gather(lambda: self._backward(batches, policy_loss, on_policy))
            for part, _ in results:
                metrics.join(part)
            for _, error in results:
                if error is not None:
                    raise error
            if ranks.count() > 1:
                sums.reduce(ranks.all_reduce)

    def _backward(
        self, batches: list[TrainBatch[T]], policy_loss: PolicyLoss, on_policy: bool
    ) -> tuple[UpdateMetrics, NonFiniteLossError | None]:
        """Accumulates the gradients of the rows that this rank has drawn, until a loss is not finite."""
        metrics = UpdateMetrics()
        try:
            for batch in batches:
                for rows, places in alike(list(batch.micro_batches(self.config.micro_batch_size))):
                    for chunk in self.policy.replay(batch.rollout.trajectory, places):
                        if on_policy and batch.replayed_log_probs is not None:
                            metrics.record_gap(batch, chunk, rows)
                            batch.store_replay(chunk, rows)
                        loss, values, counted = policy_loss(chunk, batch, rows)
                        metrics.record(loss, values, counted)
                        refuse_non_finite(float(loss.detach()), "loss", self.step + 1, batch.prompt_ids(rows))
                        self.optimizer.backward(loss)
        except NonFiniteLossError as error:
            return metrics, error
        return metrics, None

    @torch.no_grad()
    def _moved(self, batches: list[TrainBatch[T]]) -> float:
        """Returns the KL of the policy that sampled to the present one, from one sample of each prompt on all ranks.

        It is the exact one where the replay gives it, else the k3 estimate.
        """

        def own() -> tuple[float, int]:
            total, steps = 0.0, 0
            for batch in batches:
                groups = batch.rows // self.config.group_size
                first = groups.diff(prepend=groups.new_tensor([-1])) > 0
                for rows, places in replace(batch, rows=batch.rows[first]).micro_batches(self.config.micro_batch_size):
                    for chunk in self.policy.replay(batch.rollout.trajectory, places):
                        counted = batch.rollout.mask[rows][:, chunk.steps]
                        old = batch.old_log_probs[rows][:, chunk.steps]
                        kl = k3(chunk.log_probs - old) if chunk.divergence is None else chunk.divergence()
                        total += float(torch.where(counted, kl, 0.0).double().sum())
                        steps += int(counted.sum())
            return total, steps

        totals, steps = zip(*ranks.all_gather(own), strict=True)
        return float(sum(totals)) / max(sum(steps), 1)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns what a bit-exact continuation needs between two steps: tensors, and metadata that are JSON."""
        tensors = {f"adapter/{k}": v for k, v in self.policy.adapter_state_dict().items()}
        moments, metadata = self.optimizer.state()
        tensors |= {f"optimizer/{k}": v for k, v in moments.items()}
        tensors["rng/trainer"] = self.generator.get_state()
        return tensors, {"step": self.step, "positions": self.positions} | metadata

    def load_state(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        self.policy.load_adapter_state_dict(tensors_under("adapter", tensors))
        self.optimizer.load_state(tensors_under("optimizer", tensors), metadata)
        self.generator.set_state(tensors["rng/trainer"])
        self.step, self.positions = metadata["step"], dict(metadata["positions"])
