"""A step whose optimiser updates are not all done, as it goes into a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.grpo import metrics, packing
from visual_grpo.grpo.update import Experience, UpdateStats
from visual_grpo.types import Rollout, Scores, StepMetrics

T = TypeVar("T")
KEY = "unfinished"
"""In the facts of a trainer, and before the names of the tensors."""


@dataclass(kw_only=True)
class UnfinishedStep(Generic[T]):
    """A module's rollout and the updates done on it."""

    experiences: list[Experience[T]]
    drawn: list[metrics.Drawn]
    clock: metrics.Clock
    updates: list[UpdateStats] = field(default_factory=list)


@dataclass(kw_only=True)
class UnfinishedJointStep:
    """A rollout of two modules that learn from it one after the other."""

    waiting: dict[str, tuple[Rollout[Any], Scores]]
    """Modules that have not begun."""
    clock: metrics.Clock
    samples: int
    """That were decoded."""
    learning: str | None = None
    """The module whose own trainer has the rest."""
    taken: dict[str, StepMetrics] = field(default_factory=dict)
    """Modules that are done."""


def with_unfinished(
    tensors: Mapping[str, Tensor], facts: Mapping[str, Any], unfinished: Any, device: torch.device
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A trainer's state with ``unfinished``, whatever that is; None = its step is complete."""
    if not unfinished:
        return dict(tensors), {**facts, KEY: None}
    own, packed = packing.pack(unfinished)
    named = {f"{KEY}/{name}": value for name, value in own.items()}
    return {**tensors, **named}, {**facts, KEY: packed, "device": device.type}


def unfinished_of(tensors: Mapping[str, Tensor], facts: Mapping[str, Any], device: torch.device) -> Any:
    """What `with_unfinished` was given.

    Raises:
        UserError: the rollout is of another kind of device, on which the rest of the step would be computed otherwise.
    """
    if facts.get(KEY) is None:
        return None
    if facts["device"] != device.type:
        raise UserError(
            f"The checkpoint was written in the middle of a step, whose samples were drawn on {facts['device']};"
            f" model.device is {device.type} now. Go on with model.device={facts['device']}, or from an earlier"
            " checkpoint with resume=FOLDER."
        )
    start = f"{KEY}/"
    own = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
    return packing.unpack(own, facts[KEY], device)
