"""Ends a training that gains nothing any more, by the totals of the eval prompts.

A gain is proven where the one-sided t-bound of the paired differences to an earlier evaluation lies above 0. That
earlier one is the last with a proven gain, the first of the training before there is any: a slow gain adds up until it
is proven. Each of the ``patience`` evaluations that follow has the error `ERROR` / ``patience``. By Bonferroni's
inequality, a training that gains nothing ends within its patience with a probability of at least 1 - `ERROR`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from visual_grpo.common.errors import counted
from visual_grpo.evaluation.paired import paired_difference

ERROR = 0.1
"""Probability that chance alone proves a gain, in a training that has none."""


@dataclass(kw_only=True)
class Gains:
    """The last proven gain of a training, and the evaluations since; in every checkpoint."""

    step: int = 0
    """The step of the evaluation with the last proven gain; 0: there was no evaluation yet."""
    totals: list[float] = field(default_factory=list)
    """Its total rewards, one for each eval prompt; NaN = unscored."""
    without: int = 0
    """Evaluations since then, none with a proven gain."""
    change: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """The mean difference from it to the newest evaluation, and both ends of its 95% interval."""

    def look(self, step: int, totals: Sequence[float], units: Sequence[str], patience: int) -> None:
        """Compares an evaluation, ``totals[i]`` for a prompt of unit ``units[i]``, with the last proven gain.

        With fewer than two scored units, nothing can be compared: such an evaluation does not count, and a first one is
        replaced by the next.
        """
        before, now = (_scored(units, each) for each in (self.totals, totals))
        if self.step and now < 2:
            return
        if before > 1:
            level = 1 - 2 * ERROR / patience  # Both ends of the interval, of which one is used.
            if not paired_difference(self.totals, totals, units, confidence=level).ci_low > 0:
                shown = paired_difference(self.totals, totals, units)
                self.without, self.change = self.without + 1, (shown.difference, shown.ci_low, shown.ci_high)
                return
        self.step, self.totals, self.without = step, list(totals), 0

    @property
    def sentence(self) -> str:
        difference, low, high = self.change
        return (
            f"{counted(self.without, 'evaluation')} on the eval prompts since step {self.step} proved no gain (the last"
            f" differs by {difference:+.3f} [{low:+.3f}, {high:+.3f}])"
        )


def _scored(units: Sequence[str], totals: Sequence[float]) -> int:
    """Number of units with a total."""
    return len({unit for unit, total in zip(units, totals, strict=False) if not math.isnan(total)})
