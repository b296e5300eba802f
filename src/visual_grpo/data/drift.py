"""Compares two profiles of data: how far each feature has moved, and whether that is too far to train unseen."""

from __future__ import annotations

import math
from dataclasses import dataclass

from visual_grpo.common.errors import counted
from visual_grpo.config import DataChecks
from visual_grpo.data.profile import Profile, Prompts, Shares, Sized, Values

FALSE_ALARM = 1e-4
"""With what probability chance alone brings a feature of equal data above `Drift.chance`."""
_SPREAD_ALLOWED = 4.0
"""Chance hardly ever brings a divergence above this many times its mean: 3.4 at most in 200 halvings of prompts."""

_WORDS = {
    "kinds": "kinds of records",
    "prompt_text": "pairs of characters in the prompts",
    "prompt_characters": "length of the prompts in characters",
    "prompt_words": "length of the prompts in words",
}


@dataclass(frozen=True, kw_only=True)
class Drift:
    """The distance of two datasets in one feature."""

    feature: str
    """Named as in `Profile`: ``prompt_text``, ``target_brightness``."""
    distance: float
    """0 = the same distribution, 1 = nothing in common."""
    chance: float
    """Distance that equal data of these sizes hardly ever exceed; 0..1."""
    limit: str
    """The field of `DataChecks` that it is held against."""
    said: str
    """``brightness of the target images: median 0.71 before, 0.42 now; distance 0.88``."""


def drift(before: Profile, now: Profile) -> list[Drift]:
    """The features that both have, in the order of the profiles."""
    shares = [_of_shares(name, old, now.shares[name]) for name, old in before.shares.items() if name in now.shares]
    values = [_of_values(name, old, now.values[name]) for name, old in before.values.items() if name in now.values]
    return shares + values


def check(before: Profile | None, now: Profile, limits: DataChecks) -> list[str]:
    """Returns a sentence for each fault of the data; ``before`` is of the champion's data, if there is a champion."""
    usable, found = counted(now.accepted, "usable record"), now.accepted + now.rejected
    faults = []
    if now.accepted < limits.min_records:
        faults.append((f"{usable}, needed are {limits.min_records}", "min_records"))
    if now.rejected > limits.max_rejected * found:
        rejected = f"{now.rejected} of {counted(found, 'record')} rejected: {now.rejected / found:.1%}"
        faults.append((f"{rejected}, allowed are {limits.max_rejected:.1%}", "max_rejected"))
    if before is not None:
        fewer, lost = 1 - now.accepted / before.accepted, lost_share(before.prompts, now.prompts)
        if fewer > limits.max_fewer_records:
            change = f"{usable}, {before.accepted} before: {fewer:.1%} fewer"
            faults.append((f"{change}, allowed are {limits.max_fewer_records:.1%}", "max_fewer_records"))
        if lost > limits.max_lost_prompts:
            gone = f"{lost:.1%} of the earlier prompts are gone"
            faults.append((f"{gone}, allowed are {limits.max_lost_prompts:.1%}", "max_lost_prompts"))
        for one in drift(before, now):
            limit = max(float(getattr(limits, one.limit)), one.chance)
            if one.distance > limit:
                faults.append((f"{one.said}, allowed is {limit:.2f}", one.limit))
    return [f"{text} (retrain.data.{limit})." for text, limit in faults]


def lost_share(before: Prompts, now: Prompts) -> float:
    """The share of the earlier prompts that are gone, estimated from those whose hashes both samples cover; 0..1."""
    last = "g" if now.complete else now.hashes[-1]
    covered = {hashed for hashed in before.hashes if hashed <= last}
    return len(covered - set(now.hashes)) / len(covered) if covered else 0.0


def _of_values(name: str, before: Values, now: Values) -> Drift:
    """The largest difference of the shares of numbers below a bound, over all bounds (Kolmogorov-Smirnov)."""
    from scipy import stats

    distance = float(stats.ks_2samp(before.quantiles, now.quantiles, method="asymp").statistic)
    chance = float(stats.kstwobign.isf(FALSE_ALARM)) * math.sqrt(_scatter(before, now))
    medians = [values.quantiles[len(values.quantiles) // 2] for values in (before, now)]
    role, _, what = name.partition("_")
    words = _WORDS.get(name, f"{what} of the {role} images")
    return Drift(
        feature=name,
        distance=distance,
        chance=min(1.0, chance),
        limit="max_prompt_length_drift" if role == "prompt" else "max_image_drift",
        said=f"{words}: median {medians[0]:.4g} before, {medians[1]:.4g} now; distance {distance:.2f}",
    )


def _of_shares(name: str, before: Shares, now: Shares) -> Drift:
    """The Jensen-Shannon distance in bits."""
    from scipy.spatial.distance import jensenshannon

    categories = sorted(before.shares.keys() | now.shares.keys())
    both = [[side.shares.get(category, 0.0) for category in categories] for side in (before, now)]
    # Rounding makes the root of a tiny negative number of equal shares.
    distance = 0.0 if both[0] == both[1] else float(jensenshannon(*both, base=2))
    # The mean divergence of two samples from one distribution, to second order in the differences.
    mean = (before.spread + now.spread) / 2 * _scatter(before, now) / (8 * math.log(2))
    return Drift(
        feature=name,
        distance=distance,
        chance=min(1.0, math.sqrt(_SPREAD_ALLOWED * mean)),
        limit="max_kind_drift" if name == "kinds" else "max_prompt_text_drift",
        said=f"{_WORDS[name]}: distance {distance:.2f}",
    )


def _scatter(before: Sized, now: Sized) -> float:
    """1 / n + 1 / m, by which chance grows in samples of n and m.

    Both count as often repeated as the one that is less: data that have shrunk to one prompt in all records would else
    be a sample of one, of which nothing can be said.
    """
    repeated = min(side.records / side.n for side in (before, now))
    return repeated / before.records + repeated / now.records
