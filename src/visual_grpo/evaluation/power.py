"""The gain that a t-bound can detect, and the number of prompts that a gain needs.

With n independent differences of standard deviation sd and a true gain g, the t-statistic has the noncentral t
distribution of n - 1 degrees of freedom with noncentrality g sqrt(n) / sd (exact for normal differences). The bound of
level alpha lies above 0 where the statistic exceeds the quantile 1 - alpha of Student's t.
"""

from __future__ import annotations

import math
from bisect import bisect_left

POWER = 0.9
"""Share of the cases in which a gain is detected, unless asked otherwise."""
_MOST_UNITS = 10_000_000


def detectable_gain(sd: float, units: int, alpha: float, power: float = POWER) -> float:
    """The true gain that is detected with probability ``power``, in the unit of ``sd``; NaN with fewer than two units.

    ``sd`` is the standard deviation of the units' differences, ``alpha`` the one-sided level.
    """
    if units < 2 or math.isnan(sd):
        return math.nan
    return _noncentrality(units, alpha, power) * sd / math.sqrt(units)


def units_needed(gain: float, sd: float, alpha: float, power: float = POWER) -> int:
    """The fewest units with which a true ``gain`` > 0 is detected with probability ``power``; at least two."""
    if not (gain > 0 and math.isfinite(sd)):
        raise ValueError(f"expected a gain above 0 and a finite standard deviation, got {gain} and {sd}")
    units = range(2, _MOST_UNITS)
    return units[bisect_left(units, -gain, key=lambda n: -detectable_gain(sd, n, alpha, power))]


def _noncentrality(units: int, alpha: float, power: float) -> float:
    """The true gain in standard errors."""
    from scipy.optimize import brentq
    from scipy.stats import nct, t  # Half a second, which `kedro --help` should not pay.

    if not (0 < alpha < power < 1):
        raise ValueError(f"expected 0 < alpha < power < 1, got alpha {alpha} and power {power}")
    critical = t.isf(alpha, units - 1)
    largest = 1.0
    while nct.sf(critical, units - 1, largest) < power:
        largest *= 2
    return float(brentq(lambda size: nct.sf(critical, units - 1, size) - power, 0, largest))
