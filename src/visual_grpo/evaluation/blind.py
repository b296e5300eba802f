"""What share of blind choices prefers the trained model's picture, with an interval over other prompts.

Choices on one prompt, by several voters or of several samples, are correlated; an interval that takes them for
independent, such as Wilson's over choices, would be too short. So the share is a mean of the prompts' shares with
Student's t-interval on these, as the differences of scores have (`paired`), cut off at 0 and 1. Where all prompts agree
their standard deviation is 0 and says nothing; the interval is then Wilson's, with each prompt as one case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from visual_grpo.evaluation.paired import CONFIDENCE, t_interval


@dataclass(frozen=True, kw_only=True)
class Preference:
    """The share of choices for the trained model; NaN where undefined."""

    share: float
    """Mean over prompts of the mean over their choices; a tie counts one half."""
    ci_low: float
    ci_high: float
    interval: str
    """How it was computed."""
    prompts: int
    """Units that are held out together."""
    choices: int
    """With ties, without skipped ones."""
    ties: int

    @property
    def verdict(self) -> str:
        """``better``, ``worse`` or ``not shown``, as the interval excludes one half or does not."""
        return "better" if self.ci_low > 0.5 else "worse" if self.ci_high < 0.5 else "not shown"


def preference(chosen: ArrayLike, units: Sequence[str]) -> Preference:
    """``chosen`` [n]: 1 = the trained model's picture, 0 = the base model's, 0.5 = tie, of prompt ``units[n]``."""
    values = np.asarray(chosen, dtype=np.float64)
    if values.shape != (len(units),):
        raise ValueError(f"expected one unit for each of {list(values.shape)} choices, got {len(units)}")
    names, members = np.unique(np.asarray(units, dtype=object), return_inverse=True)
    shares = np.bincount(members, weights=values, minlength=len(names)) / np.bincount(members, minlength=len(names))
    share = float(shares.mean()) if len(shares) else math.nan
    if len(shares) > 1 and np.ptp(shares) > 0:
        low, high = (float(end) for end in t_interval(shares))
        interval = "t-interval over prompts"
    else:
        low, high = _wilson(share, len(shares))
        interval = "Wilson's interval over prompts, which all agree"
    return Preference(
        share=share,
        ci_low=max(0.0, low),
        ci_high=min(1.0, high),
        interval=interval,
        prompts=len(names),
        choices=len(values),
        ties=int((values == 0.5).sum()),
    )


def _wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson, Probable Inference, the Law of Succession, and Statistical Inference (JASA 22, 1927)."""
    if count == 0:
        return 0.0, 1.0
    from scipy.stats import binomtest  # Half a second, which `kedro --help` should not pay.

    # Of a number of cases; a half one (all prompts tied) is rounded towards the wider interval.
    cases = round(share * count, 9)
    low, high = (
        binomtest(number, count).proportion_ci(CONFIDENCE, method="wilson")
        for number in (math.floor(cases), math.ceil(cases))
    )
    return float(low.low), float(high.high)
