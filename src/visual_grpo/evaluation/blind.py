"""The share of blind choices that prefers the trained model's picture, with an interval over other prompts.

Choices on one prompt, by several voters or of several samples, are correlated. So the share is a mean of the prompts'
shares with Student's t-interval on these, as the differences of scores have (`paired`), cut off at 0 and 1. Where all
prompts agree their standard deviation is 0 and says nothing; the interval is then Wilson's (Probable Inference, the Law
of Succession, and Statistical Inference, JASA 22, 1927), with each prompt as one case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy.stats import binomtest

from visual_grpo.evaluation.paired import CONFIDENCE, t_interval


@dataclass(frozen=True, kw_only=True)
class Preference:
    """The share of choices for the trained model; NaN where undefined."""

    share: float
    """Mean over prompts of the mean over their choices; a tie counts one half."""
    ci_low: float
    ci_high: float
    interval: str
    """The method, in words."""
    prompts: int
    """Units that are held out together."""
    choices: int
    """Ties count, skipped pairs do not."""
    ties: int

    @property
    def verdict(self) -> str:
        """``better``, ``worse`` or ``not shown``, as the interval excludes one half or does not."""
        return "better" if self.ci_low > 0.5 else "worse" if self.ci_high < 0.5 else "not shown"


def preference(chosen: ArrayLike, units: Sequence[str]) -> Preference:
    """``chosen`` [n]: 1 = the trained model's picture, 0 = the base model's, 0.5 = tie, of prompt ``units[n]``."""
    choices = pd.DataFrame({"chosen": np.asarray(chosen, dtype=np.float64), "unit": list(units)})
    shares = choices.groupby("unit")["chosen"].mean().to_numpy(dtype=np.float64)
    if len(shares) > 1 and np.ptp(shares) > 0:
        low, high = map(float, t_interval(shares))
        interval = "t-interval over prompts"
    else:
        low, high = _wilson(shares)
        interval = "Wilson's interval over prompts, which all agree"
    return Preference(
        share=float(shares.mean()) if len(shares) else math.nan,
        ci_low=max(0.0, low),
        ci_high=min(1.0, high),
        interval=interval,
        prompts=len(shares),
        choices=len(choices),
        ties=int((choices["chosen"] == 0.5).sum()),
    )


def _wilson(shares: np.ndarray) -> tuple[float, float]:
    if not len(shares):
        return 0.0, 1.0
    # Of a number of cases; a half one (all prompts tied) is rounded towards the wider interval.
    cases = round(float(shares.sum()), 9)
    few, many = (
        binomtest(number, len(shares)).proportion_ci(CONFIDENCE, method="wilson")
        for number in (math.floor(cases), math.ceil(cases))
    )
    return few.low, many.high
