"""Compares two profiles of data: how far each feature has moved, and whether that is too far to train unseen."""

from __future__ import annotations

import hashlib
import math
import os
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from pydantic import ValidationError

from visual_grpo.common.errors import UserError, counted
from visual_grpo.common.images import read_image
from visual_grpo.config import DataChecks, Strict
from visual_grpo.config.adapter_folder import DATA_PROFILE
from visual_grpo.data.table import SPLITS, RecordTable, prompt_key

T = TypeVar("T")
Picture = tuple[Path, tuple[Any, Any]]
"""A prepared image, and the width and height of its original, if known."""

PROMPTS, IMAGES = 1000, 500
"""Most distinct prompts, and images of each role, that are looked at."""
QUANTILES = 201
BUCKETS = 128
"""Pairs of characters are counted by hash, so that no word can be read back."""
_DIGITS = 12
"""Hex digits (48 bits) of a hash: among a million items two share one with a probability of 0.2%."""
_LONGEST_SIDE = 256
"""Pixels; larger images are reduced to at most this by averaging blocks of pixels."""
_LUMA = (0.299, 0.587, 0.114)
"""ITU-R BT.601."""


class Sized(Strict):
    records: int
    """Records that have a prompt or image of the sample."""
    n: float
    """Effective number of different ones: records^2 / sum of squared records of each (Kish)."""


class Values(Sized):
    """The distribution of a number."""

    quantiles: tuple[float, ...]
    """`QUANTILES` values, evenly spaced in probability from the minimum to the maximum."""


class Shares(Sized):
    """Shares of categories; they add up to 1."""

    shares: dict[str, float]
    spread: float
    """Mean of ``sum((own - share)^2 / share)`` over single records."""


class Prompts(Strict):
    """Hashes of the distinct prompts with the lowest hashes."""

    hashes: tuple[str, ...]
    complete: bool
    """True if these are all prompts."""


class Profile(Strict):
    format: Literal[1] = 1
    accepted: int
    rejected: int
    splits: dict[str, int]
    """Records of each split."""
    prompts: Prompts
    values: dict[str, Values]
    """By name, such as ``prompt_characters`` or ``target_brightness``."""
    shares: dict[str, Shares]
    """``kinds`` (of records) and ``prompt_text`` (pairs of characters, by bucket)."""


def profile_of(records: RecordTable) -> Profile:
    """Describes all records of a manifest; the order of the records does not matter.

    Raises:
        ImageError: a prepared image of the sample is gone or damaged.
    """
    splits: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    prompts: _Sample[str] = _Sample(PROMPTS)
    targets, sources = _Sample[Picture](IMAGES), _Sample[Picture](IMAGES)
    folder = records.path.parent
    for row in records.rows():
        splits[row["split"]] += 1
        names = row["source_images"] or ()
        given = {0: "no source", 1: "one source"}.get(len(names), "several sources")
        kinds[f"{given}, {'no target' if row['target_image'] is None else 'with a target'}"] += 1
        normalised = prompt_key(row["prompt"])
        prompts.add(normalised, normalised)
        if (target := row["target_image"]) is not None:
            size = row["original_width"], row["original_height"]
            targets.add(f"{row['target_sha256'] or target} {size}", (folder / target, size))
        for name, sha256 in zip(names, row["source_sha256"] or names, strict=True):
            sources.add(sha256, (folder / name, (None, None)))
    hashes, texts, counts = zip(*prompts.items(), strict=True)
    characters, words = [len(text) for text in texts], [len(text.split()) for text in texts]
    values = {"prompt_characters": _values(characters, counts), "prompt_words": _values(words, counts)}
    values |= _image_values("target", targets.items()) | _image_values("source", sources.items())
    shares = {kind: count / kinds.total() for kind, count in sorted(kinds.items())}
    kind_shares = Shares(records=kinds.total(), n=kinds.total(), shares=shares, spread=len(shares) - 1)
    return Profile(
        accepted=splits.total(),
        rejected=records.report.get("rejected", {}).get("total", 0),
        splits={split: splits[split] for split in SPLITS},
        prompts=Prompts(hashes=hashes, complete=prompts.complete),
        values=values,
        shares={"kinds": kind_shares, "prompt_text": _text(texts, counts)},
    )


def write_profile(profile: Profile, folder: Path) -> None:
    """Writes it beside the adapters that were trained on these records."""
    (folder / DATA_PROFILE).write_text(profile.model_dump_json() + "\n", encoding="utf-8")


def read_profile(folder: Path) -> Profile | None:
    """The profile of the data that a folder's adapters were trained on, if there is one."""
    file = folder / DATA_PROFILE
    if not file.is_file():
        return None
    try:
        return Profile.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise UserError(
            f"{file} is damaged ({error.error_count()} wrong entries). Take it from the training's MLflow run"
            " (artifacts `adapters`), or remove it to train without this comparison."
        ) from error


def _image_values(role: str, images: Sequence[tuple[str, Picture, int]]) -> dict[str, Values]:
    """Distributions of the prepared pixels, and of the originals' sizes, which a manifest has of targets only."""
    found: dict[str, list[tuple[float, int]]] = {}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        described = list(pool.map(image_features, (path for _, (path, _), _ in images)))
    for (_, (_, (width, height)), count), features in zip(images, described, strict=True):
        if width and height:
            features |= {"width": width, "height": height, "aspect": width / height}
        for name, value in features.items():
            found.setdefault(f"{role}_{name}", []).append((value, count))
    return {name: _values(*zip(*pairs, strict=True)) for name, pairs in found.items()}


def _values(values: Sequence[float], counts: Sequence[int]) -> Values:
    # Only values that occur, so that whole numbers stay whole.
    levels = np.linspace(0, 1, QUANTILES)
    quantiles = np.quantile(np.asarray(values, dtype=np.float64), levels, weights=counts, method="inverted_cdf")
    return Values(**_sizes(counts), quantiles=tuple(float(f"{value:.6g}") for value in quantiles))


def _sizes(counts: Sequence[int]) -> dict[str, Any]:
    return {"records": sum(counts), "n": round(sum(counts) ** 2 / sum(count**2 for count in counts), 3)}


def _text(texts: Sequence[str], counts: Sequence[int]) -> Shares:
    """Pairs of characters; every record's prompt has the same weight whatever its length."""
    rows, weights = np.array([_pairs(text) for text in texts]), np.array(counts) / sum(counts)
    mean = weights @ rows
    there = mean > 0
    spread = ((weights @ (rows - mean) ** 2)[there] / mean[there]).sum()
    shares = {str(bucket): round(float(mean[bucket]), 8) for bucket in np.flatnonzero(there)}
    return Shares(**_sizes(counts), shares=shares, spread=round(float(spread), 6))


def _pairs(text: str) -> np.ndarray:
    """float64 [BUCKETS]: shares of the pairs of neighbouring characters, with a space before and after the text."""
    padded = f" {text} "
    pairs = [zlib.crc32(padded[start : start + 2].encode()) % BUCKETS for start in range(len(padded) - 1)]
    return np.bincount(pairs, minlength=BUCKETS) / len(pairs)


def image_features(path: Path) -> dict[str, float]:
    """Brightness, contrast, colourfulness (Hasler and Suesstrunk, 2003) and sharpness of an image, each from 0."""
    from scipy import ndimage

    image = read_image(path)
    image = image.reduce(-(-max(image.size) // _LONGEST_SIDE))
    rgb = np.asarray(image, dtype=np.float64) / 255  # [height, width, 3]
    luma = rgb @ np.array(_LUMA)
    red, green, blue = np.moveaxis(rgb, -1, 0)
    opponents = (red - green, (red + green) / 2 - blue)
    spread, mean = np.hypot(*(axis.std() for axis in opponents)), np.hypot(*(axis.mean() for axis in opponents))
    return {
        "brightness": float(luma.mean()),
        "contrast": float(luma.std()),
        "colourfulness": float(spread + 0.3 * mean),
        "sharpness": float(ndimage.laplace(luma).std()),
    }


class _Sample(Generic[T]):
    """The ``size`` distinct keys with the lowest sha256, an item of each, and how often it came.

    It is bounded in memory and does not depend on the order; datasets that share most keys get samples that do.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.complete = True
        """False if a key was left out; known after `items`."""
        self._kept: dict[str, tuple[T, int]] = {}

    def add(self, key: str, item: T) -> None:
        hashed = hashlib.sha256(key.encode()).hexdigest()[:_DIGITS]
        self._kept[hashed] = (item, self._kept.get(hashed, (item, 0))[1] + 1)
        if len(self._kept) >= 2 * self.size:
            self.items()

    def items(self) -> list[tuple[str, T, int]]:
        """(hash, item, number of times that its key was added) in the order of the hashes; drops what is too much."""
        # What is dropped is above the lowest for good, so the counts of those that stay are complete.
        lowest = sorted(self._kept)[: self.size]
        self.complete &= len(lowest) == len(self._kept)
        self._kept = {hashed: self._kept[hashed] for hashed in lowest}
        return [(hashed, *self._kept[hashed]) for hashed in lowest]


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
