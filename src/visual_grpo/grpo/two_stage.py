"""Training the two stages of one model: alternating, each with its own rollouts, or jointly from one rollout.

The outer stage decides first (GLM-Image: the tokens), the inner one continues from its decisions (the denoising).
Shapes: N prompts, A outer samples of each, D inner samples of each of those.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from visual_grpo.common.types import (
    PromptRecord,
    Rollout,
    Scorer,
    Scores,
    Share,
    StepMetrics,
    begin_scoring,
    weighted_total,
)
from visual_grpo.grpo.checkpoint import tensors_under
from visual_grpo.grpo.distributed.rollouts import roll_out
from visual_grpo.grpo.metrics import Clock
from visual_grpo.grpo.sampling import PromptOrder, with_all_groups
from visual_grpo.grpo.trainer import GRPOTrainer


class StagesTrainer(ABC):
    """Trains several modules; a subclass yields a step of all of them from ``fit``."""

    def __init__(self, trainers: Mapping[str, GRPOTrainer[Any]], steps: int, seed: int) -> None:
        self.modules, self.steps, self.seed = dict(trainers), steps, seed
        self.step = 0

    @abstractmethod
    def fit(self, prompts: Sequence[PromptRecord]) -> Iterator[StepMetrics]:
        """Trains until ``steps``; stop iterating to stop training."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns `GRPOTrainer.state` of every module."""
        tensors: dict[str, Tensor] = {}
        metadata: dict[str, Any] = {"step": self.step}
        for module, trainer in self.modules.items():
            parts, metadata[module] = trainer.state()
            tensors |= {f"{module}/{name}": value for name, value in parts.items()}
        return tensors, metadata

    def load_state(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        for module, trainer in self.modules.items():
            trainer.load_state(tensors_under(module, tensors), metadata[module])
        self.step = metadata["step"]

    def _taken(self, taken: Mapping[str, StepMetrics], samples: int) -> StepMetrics:
        """Counts a step; every module's metrics under its name, and what they have in common.

        ``samples``: the number of decoded samples.
        """
        self.step += 1
        first, *_ = shown = list(taken.values())
        values = {
            f"{module}/{name}": value for module, metrics in taken.items() for name, value in metrics.values.items()
        }
        values["reward/total"] = sum(metrics.values["reward/total"] for metrics in shown) / len(shown)
        for name in ("seconds/step", "seconds/cpu"):
            values[name] = sum(metrics.values[name] for metrics in shown)
        values["samples"] = float(samples)
        values["memory_gb"] = first.values["memory_gb"]
        return replace(first, step=self.step, values=values)


Trainer = GRPOTrainer[Any] | StagesTrainer


class AlternatingTrainer(StagesTrainer):
    """Steps each module in turn, on a separate rollout."""

    def fit(self, prompts: Sequence[PromptRecord]) -> Iterator[StepMetrics]:
        orders = {m: PromptOrder(prompts, trainer.seed, trainer.positions) for m, trainer in self.modules.items()}
        while self.step < self.steps:
            taken = {m: trainer.take_step(prompts, orders[m]) for m, trainer in self.modules.items()}
            yield self._taken(taken, sum(len(metrics.samples) for metrics in taken.values()))


class JointTrainer(StagesTrainer):
    """Trains both modules from one rollout: N prompts, A outer samples each, D inner samples of each of those.

    The outer advantage compares the A samples by the mean over their D decodes under the outer module's rewards, the
    inner one compares the D that share their outer sample under its own.
    """

    def __init__(
        self,
        policy: Any,
        trainers: Mapping[str, GRPOTrainer[Any]],
        scorer: Scorer,
        weights: Mapping[str, Mapping[str, float]],
        *,
        steps: int,
        prompts_per_step: int,
        seed: int,
    ) -> None:
        """
        Args:
            policy: generates with ``joint_rollout(prompts, outer_size, inner_size, generator, share)`` a
                `JointRollout`.
            trainers: of the outer and the inner module; their group sizes are A and D.
            scorer: judges every decode once.
            weights: module -> reward -> weight in that module's total.
        """
        super().__init__(trainers, steps, seed)
        self.policy, self.scorer, self.weights = policy, scorer, weights
        self.prompts_per_step = prompts_per_step
        self.generator = torch.Generator().manual_seed(seed)
        self.positions: dict[str, int] = {}

    def fit(self, prompts: Sequence[PromptRecord]) -> Iterator[StepMetrics]:
        order = PromptOrder(prompts, self.seed, self.positions)
        while self.step < self.steps:
            chosen = [prompts[i] for i in order.take(self.prompts_per_step)]
            self.positions = dict(order.positions)
            yield self._take_step(chosen)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, metadata = super().state()
        return tensors | {"rng/joint": self.generator.get_state()}, metadata | {"positions": self.positions}

    def load_state(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        super().load_state(tensors, metadata)
        self.generator.set_state(tensors["rng/joint"])
        self.positions = dict(metadata["positions"])

    def _take_step(self, prompts: Sequence[PromptRecord]) -> StepMetrics:
        clock = Clock(device=str(next(iter(self.modules.values())).device))
        with clock.timed("rollout"), torch.no_grad(), ExitStack() as weights:
            for trainer in self.modules.values():
                weights.enter_context(trainer.sampling_weights())
            rollouts = roll_out(prompts, self.generator, self._roll_out)
        *_, decoded = rollouts
        with clock.timed("reward"):
            scores = begin_scoring(self.scorer, decoded.prompts, decoded.samples)()
        taken: dict[str, StepMetrics] = {}
        for (name, trainer), rollout in zip(self.modules.items(), rollouts, strict=True):
            own = reweighted(scores, self.weights[name])
            mean = averaged(own, len(scores.total) // len(rollout.prompts))
            scored = [with_all_groups(rollout, mean, trainer.config.group_size)]
            taken[name] = trainer.update(scored, scored, clock)
            clock = Clock(device=clock.device)  # The rollout's seconds are reported once.
        return self._taken(taken, len(decoded.samples))

    def _roll_out(self, prompts: Sequence[PromptRecord], share: Share | None) -> list[Rollout[Any]]:
        outer, inner = (trainer.config.group_size for trainer in self.modules.values())
        rollout = self.policy.joint_rollout(prompts, outer, inner, self.generator, share)
        return [rollout.outer, rollout.inner]


def reweighted(scores: Scores, weights: Mapping[str, float]) -> Scores:
    """The same rewards with the total of other weights."""
    return replace(scores, total=weighted_total(scores.rewards, weights), weights=weights)


def averaged(scores: Scores, size: int) -> Scores:
    """Means over each ``size`` neighbouring samples, [B] -> [B / size]; unscored ones are left out.

    A sample without a total counts for no reward with a weight: their means are of the same samples.
    """
    if size == 1:
        return scores
    lacking = scores.total.isnan()

    def mean(values: Tensor) -> Tensor:
        return values.view(-1, size).nanmean(1)

    def counted(name: str) -> Tensor:
        values = scores.rewards[name]
        return values.masked_fill(lacking, torch.nan) if scores.weights.get(name) else values

    return Scores(
        total=mean(scores.total),
        rewards={name: mean(counted(name)) for name in scores.rewards},
        parts={name: mean(values) for name, values in scores.parts.items()},
        ratios={name: (mean(above), mean(below)) for name, (above, below) in scores.ratios.items()},
        weights=scores.weights,
    )
