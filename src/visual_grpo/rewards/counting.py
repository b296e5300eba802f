"""What of a reward's scores counts: within a known range, and only where other rewards are satisfied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from visual_grpo.errors import UserError, nearest_hint


@dataclass(frozen=True, kw_only=True)
class Counting:
    """How one reward counts."""

    clip: tuple[float | None, float | None] = (None, None)
    """Scores below the first count as the first, those above the second as the second; None = no limit."""
    only_where: Mapping[str, float] = field(default_factory=dict)
    """Other rewards with the least score that each must have; elsewhere this one counts as its worst.

    A reward that is easily had can so be made worthless without one that is hard (GDPO, arXiv 2601.05242, calls these
    conditioned rewards).
    """

    @property
    def changes(self) -> bool:
        """Whether anything counts differently than it was scored."""
        return self.clip != (None, None) or bool(self.only_where)

    def check(self, name: str, weight: float, rewards: Mapping[str, object]) -> None:
        """Raises UserError where this cannot be applied to the reward ``name`` of this weight among ``rewards``."""
        low, high = self.clip
        if low is not None and high is not None and not low < high:
            raise UserError(f"rewards.{name}.clip must be [low, high] with low < high, got [{low:g}, {high:g}]")
        for other in self.only_where:
            if other == name or other not in rewards:
                raise UserError(
                    f"rewards.{name}.only_where names {other!r}, which is no other reward."
                    f"{nearest_hint(other, [known for known in rewards if known != name])}"
                )
        if self.only_where and self._worst(weight) is None:
            end = "upper" if weight < 0 else "lower"
            raise UserError(
                f"rewards.{name}.only_where: where the others are not satisfied, the reward counts as the worst of its"
                f" range, and rewards.{name}.clip has no {end} end. Give it one, such as clip: [0, 1]"
            )

    def counted(self, values: Tensor, weight: float, scored: Mapping[str, Tensor]) -> Tensor:
        """The [B] scores that count, of the scores as they are; ``scored`` has those of every reward.

        What is unscored, or has an unscored condition, is NaN.
        """
        low, high = self.clip
        if low is not None or high is not None:
            values = values.clamp(low, high)
        worst = self._worst(weight)
        for other, least in self.only_where.items():
            assert worst is not None, "check has been called"
            values = values.masked_fill(scored[other] < least, worst).masked_fill(scored[other].isnan(), torch.nan)
        return values

    def _worst(self, weight: float) -> float | None:
        low, high = self.clip
        return high if weight < 0 else low
