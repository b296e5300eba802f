"""The gradient of the loss over all rows of a step, micro-batch by micro-batch and chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from visual_grpo.config import GRPOConfig
from visual_grpo.grpo.gradient_sums import GradientSums
from visual_grpo.grpo.setbacks import MOST_OVERFLOWS, refuse_non_finite
from visual_grpo.grpo.update import Experience, Objective, UpdateStats, chunk_loss
from visual_grpo.types import ManyProcesses, Policy

T = TypeVar("T")


class Gradient(Generic[T]):
    """Adds it up in the ``grad`` of the parameters of ``optimizer``, times the factor of ``scaler``."""

    def __init__(
        self,
        policy: Policy[T],
        config: GRPOConfig,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        device: torch.device,
    ) -> None:
        self.policy, self.config, self.optimizer, self.scaler, self.device = policy, config, optimizer, scaler, device
        self._many = policy if isinstance(policy, ManyProcesses) else None

    def compute(
        self, experiences: list[Experience[T]], objective: Objective, stats: UpdateStats, step: int, *, first: bool
    ) -> None:
        """
        Args:
            stats: gets the sums over what was trained on.
            step: that this is the gradient of, for messages.
            first: the weights are those that sampled, so that every ratio is 1.

        Raises:
            NonFiniteLossError: the loss is NaN or infinite.
        """
        self.optimizer.zero_grad(set_to_none=True)
        if self._many is not None:
            self._many.begin_gradient()
        with GradientSums(self._parameters()) as sums:
            for experience in experiences:
                for rows in self._micro_batches(experience):
                    for chunk in self.policy.replay(experience.rollout.trajectory, rows):
                        if first and experience.replayed_log_probs is not None:
                            experience.anchor(chunk, rows, stats)
                        loss = chunk_loss(chunk, experience, rows, objective, stats)
                        refuse_non_finite(float(loss.detach()), "loss", step, ids(experience, rows))
                        # The scaler keeps its factor beside the first loss, and notes an overflow beside the gradient.
                        self.scaler.scale(loss.to(self.device)).backward()
            if self._many is not None:
                for others in self._many.gradients_elsewhere():
                    sums.add(others)

    def of_no_update(self, experiences: list[Experience[T]], step: int) -> Tensor:
        """Flat, float32 on the CPU; nothing is changed by it.

        Float16's scale is halved until it can hold the gradient, and is then what it was before.
        """
        objective, before = Objective.of(self.config, experiences), self.scaler.state_dict()
        for _ in range(MOST_OVERFLOWS):
            self.compute(experiences, objective, UpdateStats(), step, first=True)
            if not self.scaler.is_enabled():
                break
            self.scaler.unscale_(self.optimizer)
            self.scaler.update()
            if all(gradient.isfinite().all() for gradient in self._gradients()):
                break
        self.scaler.load_state_dict(before)
        flat = torch.cat([gradient.flatten().float().cpu() for gradient in self._gradients()])
        self.optimizer.zero_grad(set_to_none=True)
        return flat

    def _micro_batches(self, experience: Experience[T]) -> Sequence[Tensor]:
        size, rows = self.config.micro_batch_size, experience.rows
        if self._many is not None:
            return self._many.micro_batches(experience.rollout.trajectory, rows, size)
        return rows.split(size or len(rows))

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._parameters() if p.grad is not None]

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def ids(experience: Experience[Any], rows: Tensor) -> list[str]:
    """Of the prompts of ``rows`` ([b])."""
    return [experience.rollout.prompts[int(row)].id for row in rows]
