"""Paired differences with a bootstrap interval.

Images of one prompt resemble each other, so prompts (clusters), not images, are drawn with
replacement: the interval answers "what if other prompts had been used". Percentile intervals and
resampling of whole sampling units: Efron & Tibshirani, An Introduction to the Bootstrap (1993),
chapters 8 and 13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

CHUNK = 256
"""Bootstrap samples drawn at a time: bounds memory to CHUNK * clusters numbers."""


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """Trained minus baseline over the pairs where both images were scored; NaN where undefined."""

    prompts: int
    images: int
    """Pairs that count."""
    unscored: int
    """Pairs left out because one image or both could not be scored."""
    baseline_mean: float
    trained_mean: float
    difference: float
    ci_low: float
    """95% interval of ``difference``; NaN below two prompts, which say nothing of other prompts."""
    ci_high: float
    win_rate: float
    """Share of pairs in which the trained image scores higher; a tie counts one half."""


def paired_bootstrap(
    baseline: ArrayLike, trained: ArrayLike, clusters: Sequence[str], samples: int, seed: int
) -> PairedDifference:
    """Compares ``baseline[i]`` with ``trained[i]``, image ``i`` of prompt ``clusters[i]``.

    ``baseline``, ``trained``: [n] scores, NaN = unscored. ``samples``: bootstrap replications.
    """
    before, after = np.asarray(baseline, dtype=np.float64), np.asarray(trained, dtype=np.float64)
    if before.ndim != 1 or before.shape != after.shape or len(clusters) != len(before):
        raise ValueError(
            f"expected [n] baseline, [n] trained and n clusters, got {before.shape}, {after.shape} and {len(clusters)}"
        )
    scored = ~(np.isnan(before) | np.isnan(after))
    names, members = np.unique(np.asarray(clusters, dtype=object)[scored], return_inverse=True)
    before, after = before[scored], after[scored]
    low, high = _interval(after - before, members, len(names), samples, seed)
    wins = np.where(after == before, 0.5, after > before)
    return PairedDifference(
        prompts=len(names),
        images=len(before),
        unscored=int((~scored).sum()),
        baseline_mean=_mean(before),
        trained_mean=_mean(after),
        difference=_mean(after - before),
        ci_low=low,
        ci_high=high,
        win_rate=_mean(wins),
    )


def _interval(
    differences: NDArray[np.float64], members: NDArray[np.intp], clusters: int, samples: int, seed: int
) -> tuple[float, float]:
    """Percentile interval of the mean over images when whole clusters are drawn with replacement."""
    if clusters < 2:
        return float("nan"), float("nan")
    sums = np.bincount(members, weights=differences, minlength=clusters)
    counts = np.bincount(members, minlength=clusters)
    generator = np.random.default_rng(seed)
    means = np.empty(samples)
    for start in range(0, samples, CHUNK):
        size = min(CHUNK, samples - start)
        drawn = generator.multinomial(clusters, np.full(clusters, 1 / clusters), size=size)
        means[start : start + size] = (drawn @ sums) / (drawn @ counts)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else float("nan")
