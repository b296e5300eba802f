"""Scales the learning rate so that the updates of a step move the policy by about a target KL.

The KL of near policies grows with the square of the distance of their weights, and AdamW's distance with its learning
rate. So an update that moves the policy by k instead of t would move it by t with the learning rate times sqrt(t / k).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from visual_grpo.common.errors import UserError

log = logging.getLogger(__name__)

LARGEST_SCALE = 10.0
"""Largest factor on the learning rate; without it, a target out of reach would raise the rate without end."""
PATIENCE = 10
"""Updates after the warm-up in which a target has to be reached: enough to raise the rate to the largest scale."""
_RISE, _LEAST, _TRIES = 1.5, 0.1, 8


class TrustRegion:
    """Shortens updates that moved the policy too far, and chooses the learning rate of the next ones."""

    def __init__(self, parameters: Sequence[nn.Parameter], target: float, *, rounds: bool = False) -> None:
        """``target``: nats a token, or a latent element; ``rounds``: sampler and replay differ without any update."""
        self.parameters, self.target, self.rounds = parameters, target, rounds
        self.scale = 1.0
        """Factor on the learning rate."""
        self.moved = self.reached = 0.0
        """KL by which this step has moved the policy so far, and the largest share of an update's own target that was
        measured."""
        self._updates = 0
        self._start: list[Tensor] = []
        self._rounding = 0.0
        self._measure: Callable[[], float] = lambda: math.nan

    def begin(self, measure: Callable[[], float]) -> None:
        """Begins a step at the present weights; ``measure`` returns the KL of their policy to the one by then.

        Raises UserError where rounding alone exceeds the target before the run's first update.
        """
        self._start = [parameter.detach().clone() for parameter in self.parameters]
        self._measure, self.moved = measure, 0.0
        self._rounding = measure() if self.rounds else 0.0
        if self._rounding > self.target and not self._updates:
            raise UserError(
                f"grpo.target_kl is {self.target:g}, but rounding alone moves the policy by {self._rounding:.2g} from"
                " the one that sampled, so the target cannot be measured. Raise target_kl above that, use"
                " model.dtype=float32, or leave target_kl out."
            )

    def hold(self, part: float, *, taught: bool = True) -> float:
        """Takes back the part of an update beyond the target; returns what is left of its learning rate.

        ``part``: the share of the step's length that should be done, by the schedule and the updates so far. Large
        steps leave the range in which the KL is a square, and are measured again. ``taught``: whether the update had a
        gradient; one without, as of equal rewards, says nothing about the learning rate.
        """
        target, left, ratio = self.target * part**2, 1.0, 1.0
        for _ in range(_TRIES):
            self.moved = max(self._measure() - self._rounding, 0.0)  # Of NaN it is NaN.
            ratio = self._ratio(target)
            if ratio >= 1:
                break
            self._shorten(ratio)
            left, self.moved = left * ratio, self.moved * ratio**2
            if ratio > 0.5:
                break
        else:
            log.warning("An update may exceed target_kl (%g): it was still too long %d times.", self.target, _TRIES)
        if taught:
            self.scale = min(self.scale * (left if left < 1 else min(ratio, _RISE)), LARGEST_SCALE)
            self._updates += 1
        return left

    def refuse_unreached(self, learning_rate: float, warmup: int) -> None:
        """Raises UserError where updates have moved the policy by less than half of their targets so far."""
        if self._updates < PATIENCE + warmup or self.reached >= 0.5:
            return
        raise UserError(
            f"grpo.target_kl is {self.target:g}, but {self._updates} updates moved the policy by at most"
            f" {self.reached:.2g} times what they should, the last with {self.scale:.3g} times grpo.learning_rate"
            f" ({learning_rate:g}). Set target_kl to what can be reached, raise the learning rate, or leave it out."
        )

    def state(self) -> dict[str, Any]:
        """Returns what a bit-exact continuation needs, as JSON."""
        return {"scale": self.scale, "reached": self.reached, "updates": self._updates}

    def load_state(self, state: dict[str, Any]) -> None:
        self.scale, self.reached, self._updates = state["scale"], state["reached"], state["updates"]

    def _ratio(self, target: float) -> float:
        """Returns the length that reaches ``target``, as a share of the last measurement's length."""
        if not math.isfinite(self.moved):
            return _LEAST
        self.reached = max(self.reached, self.moved / target)
        return max(math.sqrt(target / self.moved), _LEAST) if self.moved > 0 else math.inf

    @torch.no_grad()
    def _shorten(self, ratio: float) -> None:
        for parameter, start in zip(self.parameters, self._start, strict=True):
            parameter.copy_(start.lerp(parameter, ratio))
