"""What becomes of an optimiser update whose loss or gradient is not finite: stop, leave it out, or go slower too."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, Literal

from visual_grpo.errors import UserError

Reaction = Literal["stop", "skip", "lower"]
MOST_IN_A_ROW = 3
"""Updates that are left out one after the other before the run stops: a model that is broken stays so."""
MOST_OVERFLOWS = 24
"""Updates in a row that float16's scaler leaves out because the gradient overflows. It starts at 2^16 and halves each
time, so that after 24 the scale is no longer to blame."""
LOWERED = 0.5
_SHOWN = 8

log = logging.getLogger(__name__)


class NonFiniteLossError(UserError):
    """The loss or its gradient is NaN or infinite; nothing was updated with it."""


class Setbacks:
    """Counts the updates of one module that came to nothing."""

    def __init__(self, reaction: Reaction) -> None:
        self.reaction = reaction
        self.in_a_row = self.overflows = 0
        self.factor = 1.0
        """Of the learning rate, halved by every setback where the reaction is ``lower``."""

    def left_out(self, error: NonFiniteLossError) -> None:
        """An update was left out.

        Raises:
            NonFiniteLossError: ``error``, if the run should stop.
        """
        if self.reaction == "stop":
            raise error
        if self.in_a_row == MOST_IN_A_ROW:
            raise NonFiniteLossError(f"{error} The {self.in_a_row} updates before it were left out already.") from error
        self.in_a_row += 1
        slower = ""
        if self.reaction == "lower":
            self.factor *= LOWERED
            slower = f", and the learning rate is {self.factor:g} of the configured one from now on"
        log.warning("%s The update is left out%s.", str(error).partition(". ")[0] + ".", slower)

    def taken(self) -> None:
        """An update was taken."""
        self.in_a_row = 0

    def scaled(self, before: float, after: float, step: int) -> None:
        """Float16's scale before and after an update; it falls where the update was left out.

        Raises:
            NonFiniteLossError: the gradient overflows at every scale.
        """
        self.overflows = self.overflows + 1 if after < before else 0
        if self.overflows > MOST_OVERFLOWS:
            raise NonFiniteLossError(
                f"The gradient was not finite in {self.overflows} updates in a row, at step {step} still with a loss"
                f" scale of {after:g}: it is NaN, or float16 cannot hold it. Use model.dtype=bfloat16 or float32, or a"
                " lower grpo.learning_rate."
            )

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON."""
        return {"in_a_row": self.in_a_row, "overflows": self.overflows, "factor": self.factor}

    def load_state(self, state: dict[str, Any]) -> None:
        self.in_a_row, self.overflows, self.factor = state["in_a_row"], state["overflows"], state["factor"]


def refuse_non_finite(value: float, what: str, step: int, prompts: Sequence[str]) -> None:
    """Raises NonFiniteLossError unless ``value`` is finite.

    Args:
        what: the loss or the norm of its gradient.
        prompts: ids of those that it was computed on.
    """
    if math.isfinite(value):
        return
    ids = sorted(set(prompts))
    raise NonFiniteLossError(
        f"The {what} became {value} at step {step} with the prompts {', '.join(ids[:_SHOWN])}"
        f"{' ...' * (len(ids) > _SHOWN)}. Nothing was updated with it; the last checkpoint is intact. Lower"
        " grpo.learning_rate or the clip, look at the rewards of these prompts, or leave such updates out with"
        " grpo.non_finite=skip (lower: and halve the learning rate)."
    )
