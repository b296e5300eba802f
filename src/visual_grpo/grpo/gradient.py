"""The gradient of the loss over all rows of a step, micro-batch by micro-batch and chunk by chunk."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from visual_grpo.config import GRPOConfig
from visual_grpo.distributed import group
from visual_grpo.distributed.policy import LocalPart
from visual_grpo.grpo.gradient_sums import GradientSums
from visual_grpo.grpo.setbacks import MOST_OVERFLOWS, NonFiniteLossError, refuse_non_finite
from visual_grpo.grpo.update import Experience, Objective, UpdateStats, chunk_loss
from visual_grpo.types import Policy

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
        with GradientSums(self._parameters()) as sums:
            found = group.everyone(lambda: self._backward(experiences, objective, step, first))
            for own, _ in found:
                stats.join(own)
            for _, error in found:
                if error is not None:
                    raise error
            if group.count() > 1:
                sums.reduce(group.total)

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

    def _backward(
        self, experiences: list[Experience[T]], objective: Objective, step: int, first: bool
    ) -> tuple[UpdateStats, NonFiniteLossError | None]:
        """Adds up the gradients of the rows that this rank has drawn, until a loss is not finite."""
        stats = UpdateStats()
        # Without a row, too, a rank's scaler needs its factor; it keeps it where its first loss is.
        self.scaler.scale(torch.zeros((), device=self.device))
        for experience in experiences:
            trajectory, rows = experience.rollout.trajectory, experience.rows
            if isinstance(trajectory, LocalPart):
                rows = trajectory.among(rows)
            for batch in rows.split(self.config.micro_batch_size or max(1, len(rows))) if len(rows) else ():
                for chunk in self.policy.replay(trajectory, batch):
                    if first and experience.replayed_log_probs is not None:
                        experience.anchor(chunk, batch, stats)
                    loss = chunk_loss(chunk, experience, batch, objective, stats)
                    try:
                        refuse_non_finite(float(loss.detach()), "loss", step, ids(experience, batch))
                    except NonFiniteLossError as error:
                        return stats, error
                    self.scaler.scale(loss.to(self.device)).backward()
        return stats, None

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._parameters() if p.grad is not None]

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def ids(experience: Experience[Any], rows: Tensor) -> list[str]:
    """Of the prompts of ``rows`` ([b])."""
    return [experience.rollout.prompts[int(row)].id for row in rows]
