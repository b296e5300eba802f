"""Training the two stages of one model: alternating, each with its own rollouts, or jointly from one rollout.

The outer stage decides first (GLM-Image: the tokens), the inner one continues from its decisions (the denoising).
Shapes: N prompts, A outer samples of each, D inner samples of each of those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from visual_grpo.grpo import metrics
from visual_grpo.grpo.order import PromptOrder
from visual_grpo.grpo.trainer import GRPOTrainer
from visual_grpo.types import JointPolicy, PromptRecord, Scorer, Scores, StepMetrics, weighted_total


class AlternatingTrainer:
    """A step is one step of each module, in the order given, each on its own rollout."""

    def __init__(self, trainers: Mapping[str, GRPOTrainer[Any]], steps: int, seed: int) -> None:
        self.modules, self.steps, self.seed = dict(trainers), steps, seed
        self.step = 0

    def fit(self, prompts: Sequence[PromptRecord]) -> Iterator[StepMetrics]:
        """Trains until ``steps``; stop iterating to stop training."""
        orders = {m: PromptOrder.over(prompts, trainer.seed, trainer.positions) for m, trainer in self.modules.items()}
        while self.step < self.steps:
            taken = {m: trainer.take_step(prompts, orders[m]) for m, trainer in self.modules.items()}
            self.step += 1
            yield _together(self.step, taken, sum(len(own.samples) for own in taken.values()))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """As `GRPOTrainer.state`, of every module."""
        return _states(self.modules, {"step": self.step})

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        _load_states(self.modules, tensors, facts)
        self.step = facts["step"]


class JointTrainer:
    """One rollout trains both modules: N prompts, A outer samples each, D inner samples of each of those.

    The outer advantage compares the A samples by the mean over their D decodes under the outer module's rewards, the
    inner one compares the D that share their outer sample under its own. A module with one sample has nothing to
    compare and is not trained: with D = 1 this is the outer module's `GRPOTrainer`, with A = 1 the inner's.
    """

    def __init__(
        self,
        policy: JointPolicy,
        outer: tuple[str, GRPOTrainer[Any] | None],
        inner: tuple[str, GRPOTrainer[Any] | None],
        scorer: Scorer,
        weights: Mapping[str, Mapping[str, float]],
        *,
        steps: int,
        prompts_per_step: int,
        sizes: tuple[int, int],
        seed: int,
    ) -> None:
        """
        Args:
            outer, inner: each module's name and trainer; None where its number of samples is 1.
            scorer: judges every decode once.
            weights: module -> reward -> weight in that module's total.
            sizes: (A, D).
        """
        self.policy, self.outer, self.inner = policy, outer, inner
        self.scorer, self.weights = scorer, weights
        self.steps, self.prompts_per_step, self.sizes, self.seed = steps, prompts_per_step, sizes, seed
        self.generator = torch.Generator().manual_seed(seed)
        self.step = 0
        self.positions: dict[str, int] = {}

    @property
    def modules(self) -> dict[str, GRPOTrainer[Any]]:
        return {name: trainer for name, trainer in (self.outer, self.inner) if trainer is not None}

    def fit(self, prompts: Sequence[PromptRecord]) -> Iterator[StepMetrics]:
        """Trains until ``steps``; stop iterating to stop training."""
        order = PromptOrder.over(prompts, self.seed, self.positions)
        while self.step < self.steps:
            taken, samples = self._take_step(prompts, order)
            self.positions = dict(order.positions)
            self.step += 1
            yield _together(self.step, taken, samples)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """As `GRPOTrainer.state`, of every module."""
        tensors, facts = _states(self.modules, {"step": self.step, "positions": self.positions})
        tensors["rng/joint"] = self.generator.get_state()
        return tensors, facts

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        _load_states(self.modules, tensors, facts)
        self.generator.set_state(tensors["rng/joint"])
        self.step, self.positions = facts["step"], dict(facts["positions"])

    def _take_step(self, prompts: Sequence[PromptRecord], order: PromptOrder) -> tuple[dict[str, StepMetrics], int]:
        """Each module's metrics, and the number of decoded samples."""
        chosen = [prompts[i] for i in order.draw(self.prompts_per_step)]
        clock = metrics.Clock(device=str(_device(self.modules)))
        with clock.phase("rollout"), torch.no_grad():
            rollout = self.policy.joint_rollout(chosen, *self.sizes, self.generator)
        decoded = rollout.inner if rollout.inner is not None else rollout.outer
        assert decoded is not None
        with clock.phase("reward"):
            scores = self.scorer(decoded.prompts, decoded.samples)
        taken: dict[str, StepMetrics] = {}
        for (name, trainer), own in ((self.outer, rollout.outer), (self.inner, rollout.inner)):
            if trainer is not None and own is not None:
                mean = averaged(scores, len(scores.total) // len(own.prompts))
                taken[name] = trainer.learn(own, reweighted(mean, self.weights[name]), clock)
                clock = metrics.Clock(device=str(_device(self.modules)))  # The rollout's seconds are reported once.
        return taken, len(decoded.samples)


def reweighted(scores: Scores, weights: Mapping[str, float]) -> Scores:
    """The same rewards with the total of other weights."""
    return replace(scores, total=weighted_total(scores.rewards, weights), weights=weights)


def averaged(scores: Scores, size: int) -> Scores:
    """Means over each ``size`` neighbouring samples, [B] -> [B / size]; unscored ones are left out."""
    if size == 1:
        return scores

    def mean(values: Tensor) -> Tensor:
        return values.view(-1, size).nanmean(1)

    return Scores(
        total=mean(scores.total),
        rewards={name: mean(values) for name, values in scores.rewards.items()},
        parts={name: mean(values) for name, values in scores.parts.items()},
        ratios={name: (mean(above), mean(below)) for name, (above, below) in scores.ratios.items()},
        weights=scores.weights,
    )


def _together(step: int, taken: Mapping[str, StepMetrics], samples: int) -> StepMetrics:
    """Every module's metrics under its name, and what they have in common."""
    if len(taken) == 1:
        (only,) = taken.values()
        return only
    values = {f"{module}/{name}": value for module, own in taken.items() for name, value in own.values.items()}
    first, *_ = shown = list(taken.values())
    values["reward/total"] = sum(own.values["reward/total"] for own in shown) / len(shown)
    for name in ("seconds/step", "seconds/cpu"):
        values[name] = sum(own.values[name] for own in shown)
    values["samples"] = float(samples)
    values["memory_gb"] = first.values["memory_gb"]
    return StepMetrics(step=step, values=values, prompts=first.prompts, samples=first.samples, rewards=first.rewards)


def _device(modules: Mapping[str, GRPOTrainer[Any]]) -> torch.device:
    return next(iter(modules.values())).device


def _states(modules: Mapping[str, GRPOTrainer[Any]], own: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    facts: dict[str, Any] = dict(own)
    for module, trainer in modules.items():
        parts, facts[module] = trainer.state()
        tensors |= {f"{module}/{name}": value for name, value in parts.items()}
    return tensors, facts


def _load_states(
    modules: Mapping[str, GRPOTrainer[Any]], tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    for module, trainer in modules.items():
        start = f"{module}/"
        own = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
        trainer.load_state(own, facts[module])
