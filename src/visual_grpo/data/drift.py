"""Describes prepared records by a profile, and checks how far those of new data have moved from an earlier one.

A profile has counts, distributions and hashes, and no prompt. A prompt or image that several records share counts as
often as they do, but the effect of chance depends on the number of different ones.
"""

from __future__ import annotations

import hashlib
import math
import os
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
from pydantic import ValidationError
from scipy import ndimage, stats
from scipy.spatial.distance import jensenshannon

from visual_grpo.common.errors import UserError, counted
from visual_grpo.common.images import read_image
from visual_grpo.config import DataChecks, Strict
from visual_grpo.config.adapter_folder import DATA_PROFILE
from visual_grpo.data.manifest import SPLITS, RecordTable, prompt_key

T = TypeVar("T")
Picture = tuple[Path, tuple[Any, Any]]
"""A prepared image, and the width and height of its original, if known."""

MAX_PROMPTS, MAX_IMAGES = 1000, 500
"""Distinct prompts, and images of each role, in a sample."""
QUANTILES = 201
BUCKETS = 128
"""Pairs of characters are counted by hash, so that no word can be read back."""
_DIGITS = 12
"""Hex digits (48 bits) of a hash: among a million items two share one with a probability of 0.2%."""
_MAX_SIDE = 256
"""Pixels; larger images are reduced to at most this by averaging blocks of pixels."""
_LUMA = (0.299, 0.587, 0.114)
"""ITU-R BT.601."""
_FALSE_ALARM = 1e-4
"""Probability that a feature of equal data exceeds `Drift.chance`."""
_SPREAD_ALLOWED = 4.0
"""Multiple of its mean that a divergence hardly ever exceeds by chance: 3.4 at most in 200 halvings of prompts."""
_SHARES = {
    "kinds": ("max_kind_drift", "kinds of records"),
    "prompt_text": ("max_prompt_text_drift", "pairs of characters in the prompts"),
}


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
    prompts = _Sample[str](MAX_PROMPTS)
    targets, sources = _Sample[Picture](MAX_IMAGES), _Sample[Picture](MAX_IMAGES)
    folder = records.path.parent
    for row in records.rows():
        splits[row["split"]] += 1
        names, target = row["source_images"] or (), row["target_image"]
        source_kind = {0: "no source", 1: "one source"}.get(len(names), "several sources")
        kinds[f"{source_kind}, {'no target' if target is None else 'with a target'}"] += 1
        prompt = prompt_key(row["prompt"])
        prompts.add(prompt, prompt)
        if target is not None:
            size = row["original_width"], row["original_height"]
            targets.add(f"{row['target_sha256'] or target} {size}", (folder / target, size))
        for name, sha256 in zip(names, row["source_sha256"] or names, strict=True):
            sources.add(sha256, (folder / name, (None, None)))
    hashes, texts, counts = zip(*prompts.items(), strict=True)
    characters, words = [len(text) for text in texts], [len(text.split()) for text in texts]
    values = {"prompt_characters": _values(characters, counts), "prompt_words": _values(words, counts)}
    values |= _image_values("target", targets) | _image_values("source", sources)
    shares = {kind: count / kinds.total() for kind, count in sorted(kinds.items())}
    kind_shares = Shares(records=kinds.total(), n=kinds.total(), shares=shares, spread=len(shares) - 1)
    return Profile(
        accepted=splits.total(),
        rejected=records.report.get("rejected", {}).get("total", 0),
        splits={split: splits[split] for split in SPLITS},
        prompts=Prompts(hashes=hashes, complete=prompts.complete),
        values=values,
        shares={"kinds": kind_shares, "prompt_text": _text_shares(texts, counts)},
    )


def write_profile(profile: Profile, folder: Path) -> None:
    (folder / DATA_PROFILE).write_text(profile.model_dump_json() + "\n", encoding="utf-8")


def read_profile(folder: Path) -> Profile | None:
    """Returns the profile of the data that a folder's adapters were trained on, if there is one."""
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


class _Sample(Generic[T]):
    """Keeps the ``size`` distinct keys with the lowest sha256, an item of each, and how often it was added.

    It is bounded in memory and does not depend on the order; datasets that share most keys get samples that do.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.complete = True
        """False if a key was left out; known after `items`."""
        self._kept: dict[str, tuple[T, int]] = {}

    def add(self, key: str, item: T) -> None:
        digest = hashlib.sha256(key.encode()).hexdigest()[:_DIGITS]
        self._kept[digest] = (item, self._kept.get(digest, (item, 0))[1] + 1)
        if len(self._kept) >= 2 * self.size:
            self.items()

    def items(self) -> list[tuple[str, T, int]]:
        """Drops the keys beyond ``size`` and returns (hash, item, count) in the order of the hashes."""
        # A dropped key stays above the lowest ones, so the counts of those that stay are complete.
        lowest = sorted(self._kept)[: self.size]
        self.complete &= len(lowest) == len(self._kept)
        self._kept = {digest: self._kept[digest] for digest in lowest}
        return [(digest, *self._kept[digest]) for digest in lowest]


def _image_values(role: str, sample: _Sample[Picture]) -> dict[str, Values]:
    """Returns distributions of the prepared pixels and, if known, of the originals' sizes."""
    images = sample.items()
    pairs: dict[str, list[tuple[float, int]]] = {}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        described = list(pool.map(image_features, (path for _, (path, _), _ in images)))
    for (_, (_, (width, height)), count), features in zip(images, described, strict=True):
        if width and height:
            features |= {"width": width, "height": height, "aspect": width / height}
        for name, value in features.items():
            pairs.setdefault(f"{role}_{name}", []).append((value, count))
    return {name: _values(*zip(*weighted, strict=True)) for name, weighted in pairs.items()}


def _values(values: Sequence[float], counts: Sequence[int]) -> Values:
    # Only values that occur, so that whole numbers stay whole.
    levels = np.linspace(0, 1, QUANTILES)
    quantiles = np.quantile(np.asarray(values, dtype=np.float64), levels, weights=counts, method="inverted_cdf")
    return Values(**_sizes(counts), quantiles=tuple(float(f"{value:.6g}") for value in quantiles))


def _sizes(counts: Sequence[int]) -> dict[str, Any]:
    return {"records": sum(counts), "n": round(sum(counts) ** 2 / sum(count**2 for count in counts), 3)}


def _text_shares(texts: Sequence[str], counts: Sequence[int]) -> Shares:
    """Counts pairs of characters; every record's prompt has the same weight whatever its length."""
    rows, weights = np.array([_pair_shares(text) for text in texts]), np.array(counts) / sum(counts)
    mean = weights @ rows
    used = mean > 0
    spread = ((weights @ (rows - mean) ** 2)[used] / mean[used]).sum()
    shares = {str(bucket): round(float(mean[bucket]), 8) for bucket in np.flatnonzero(used)}
    return Shares(**_sizes(counts), shares=shares, spread=round(float(spread), 6))


def _pair_shares(text: str) -> np.ndarray:
    """float64 [BUCKETS]: shares of the pairs of neighbouring characters, with a space before and after the text."""
    padded = f" {text} "
    pairs = [zlib.crc32(padded[start : start + 2].encode()) % BUCKETS for start in range(len(padded) - 1)]
    return np.bincount(pairs, minlength=BUCKETS) / len(pairs)


def image_features(path: Path) -> dict[str, float]:
    """Brightness, contrast, colourfulness (Hasler and Suesstrunk, 2003) and sharpness of an image, each from 0."""
    image = read_image(path)
    image = image.reduce(-(-max(image.size) // _MAX_SIDE))
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


class Drift(NamedTuple):
    """The distance of two datasets in one feature, 0 (the same distribution) to 1 (nothing in common)."""

    feature: str
    distance: float
    chance: float
    """Distance that equal data of these sizes hardly ever exceed; 0..1."""
    limit: str
    """Field of `DataChecks` with the largest distance allowed."""
    text: str
    """``brightness of the target images: median 0.71 before, 0.42 now; distance 0.88``."""


def check(before: Profile | None, now: Profile, limits: DataChecks) -> list[str]:
    """Returns a sentence for each fault of the data; ``before`` is of the champion's data, if there is a champion."""
    usable, total = counted(now.accepted, "usable record"), now.accepted + now.rejected
    faults = []
    if now.accepted < limits.min_records:
        faults.append((f"{usable}, needed are {limits.min_records}", "min_records"))
    rejected = now.rejected / max(total, 1)
    shares = [(rejected, f"{now.rejected} of {counted(total, 'record')} rejected: {rejected:.1%}", "max_rejected")]
    if before is not None:
        fewer, lost = 1 - now.accepted / before.accepted, lost_share(before.prompts, now.prompts)
        shares += [
            (fewer, f"{usable}, {before.accepted} before: {fewer:.1%} fewer", "max_fewer_records"),
            (lost, f"{lost:.1%} of the earlier prompts are gone", "max_lost_prompts"),
        ]
    for share, text, limit in shares:
        if share > getattr(limits, limit):
            faults.append((f"{text}, allowed are {getattr(limits, limit):.1%}", limit))
    for feature in [] if before is None else drift(before, now):
        allowed = max(getattr(limits, feature.limit), feature.chance)
        if feature.distance > allowed:
            faults.append((f"{feature.text}, allowed is {allowed:.2f}", feature.limit))
    return [f"{text} (retrain.data.{limit})." for text, limit in faults]


def drift(before: Profile, now: Profile) -> list[Drift]:
    """Compares the features that both profiles have, in their order."""
    shares = [_shares_drift(name, old, now.shares[name]) for name, old in before.shares.items() if name in now.shares]
    values = [_values_drift(name, old, now.values[name]) for name, old in before.values.items() if name in now.values]
    return shares + values


def lost_share(before: Prompts, now: Prompts) -> float:
    """Estimates the share of the earlier prompts that are gone, 0..1, from those whose hashes both samples cover."""
    last = "g" if now.complete else now.hashes[-1]
    covered = {digest for digest in before.hashes if digest <= last}
    return len(covered - set(now.hashes)) / len(covered) if covered else 0.0


def _values_drift(name: str, before: Values, now: Values) -> Drift:
    """Kolmogorov-Smirnov: the largest difference, over all bounds, of the shares of numbers below a bound."""
    distance = float(stats.ks_2samp(before.quantiles, now.quantiles, method="asymp").statistic)
    chance = float(stats.kstwobign.isf(_FALSE_ALARM)) * math.sqrt(_scatter(before, now))
    medians = [values.quantiles[len(values.quantiles) // 2] for values in (before, now)]
    role, _, feature = name.partition("_")
    title = f"length of the prompts in {feature}" if role == "prompt" else f"{feature} of the {role} images"
    text = f"{title}: median {medians[0]:.4g} before, {medians[1]:.4g} now; distance {distance:.2f}"
    limit = "max_prompt_length_drift" if role == "prompt" else "max_image_drift"
    return Drift(name, distance, min(1.0, chance), limit, text)


def _shares_drift(name: str, before: Shares, now: Shares) -> Drift:
    """The Jensen-Shannon distance in bits."""
    categories = sorted(before.shares.keys() | now.shares.keys())
    both = [[profile.shares.get(category, 0.0) for category in categories] for profile in (before, now)]
    # Rounding makes the root of a tiny negative number of equal shares.
    distance = 0.0 if both[0] == both[1] else float(jensenshannon(*both, base=2))
    # The mean divergence of two samples from one distribution, to second order in the differences.
    mean = (before.spread + now.spread) / 2 * _scatter(before, now) / (8 * math.log(2))
    chance = min(1.0, math.sqrt(_SPREAD_ALLOWED * mean))
    limit, title = _SHARES[name]
    return Drift(name, distance, chance, limit, f"{title}: distance {distance:.2f}")


def _scatter(before: Sized, now: Sized) -> float:
    """Returns 1 / n + 1 / m, by which chance grows in samples of n and m.

    Both count as often repeated as the less repeated one: data that have shrunk to one prompt in all records would
    otherwise be a sample of one, of which nothing can be said.
    """
    repeated = min(profile.records / profile.n for profile in (before, now))
    return repeated / before.records + repeated / now.records
