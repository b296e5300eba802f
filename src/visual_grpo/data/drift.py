"""Describes prepared records by a profile, and checks how far the profile of new data has moved from an earlier one.

A profile has counts, distributions and hashes, and no prompt. A prompt or image that several records share counts as
often as they do, but the effect of chance depends on the number of different ones.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from string import ascii_lowercase
from typing import Generic, Literal, NamedTuple, TypeVar

import numpy as np
from pydantic import ValidationError
from scipy import ndimage, stats

from visual_grpo.adapter_folder import DATA_PROFILE
from visual_grpo.common.errors import UserError, counted
from visual_grpo.common.images import LUMA, read_image
from visual_grpo.common.videos import frame_name
from visual_grpo.config import DataChecks, Strict
from visual_grpo.data.manifest import RecordTable
from visual_grpo.data.splits import prompt_key

T = TypeVar("T")
Picture = tuple[Path, dict[str, float]]
"""A prepared image, and the width, height and aspect of its original, if known."""

MAX_RECORDS, MAX_PROMPTS, MAX_IMAGES = 1000, 1000, 500
"""Records, distinct prompts, and images of each role, in a sample."""
QUANTILES = 201
_DIGITS = 12
"""Hex digits (48 bits) of a hash: among a million items two share one with a probability of 0.2%."""
_MAX_SIDE = 256
"""Pixels; larger images are reduced to at most this by averaging blocks of pixels."""
_FALSE_ALARM = 1e-4
"""Probability that a feature of equal data exceeds `Drift.chance`."""
_ROLES = {
    "record": ("records", "max_kind_drift"),
    "prompt": ("prompts", "max_prompt_drift"),
    "target": ("target images", "max_image_drift"),
    "source": ("source images", "max_image_drift"),
}
"""First part of a value's name -> what it is of, and the field of `DataChecks` with the largest distance allowed."""


class Values(Strict):
    """The distribution of a number."""

    records: int
    """Records that have a prompt or image of the sample."""
    n: float
    """Effective number of different ones: records^2 / sum of squared records of each (Kish)."""
    mean: float
    quantiles: tuple[float, ...]
    """`QUANTILES` values, evenly spaced in probability from the minimum to the maximum."""


class Profile(Strict):
    format: Literal[2] = 2
    accepted: int
    rejected: int
    prompts: tuple[str, ...]
    """Hashes of the `MAX_PROMPTS` distinct prompts with the lowest hashes."""
    values: dict[str, Values]
    """Values by the name of what is measured, such as ``prompt_characters`` or ``target_brightness``."""


def profile_of(records: RecordTable) -> Profile:
    """Describes all records, whatever their order. Raises ImageError if a prepared image is gone or damaged."""
    kinds = _Sample[dict[str, float]](MAX_RECORDS)
    prompts = _Sample[str](MAX_PROMPTS)
    targets, sources = _Sample[Picture](MAX_IMAGES), _Sample[Picture](MAX_IMAGES)
    folder = records.path.parent
    for row in records.rows():
        names, target = row["source_images"] or (), row["target_image"]
        kinds.add(row["id"], {"sources": len(names), "targets": target is not None})
        prompt = prompt_key(row["prompt"])
        prompts.add(prompt, prompt)
        if target is not None:
            width, height = row["original_width"], row["original_height"]
            size = {"width": width, "height": height, "aspect": width / height} if width else {}
            picture = frame_name(folder / target, 0) if (folder / target).is_dir() else folder / target
            targets.add(f"{row['target_sha256'] or target} {size}", (picture, size))
        for name, sha256 in zip(names, row["source_sha256"] or names, strict=True):
            sources.add(sha256, (folder / name, {}))
    hashes, texts, counts = zip(*prompts.items(), strict=True)
    values = _values("record", ((kind, count) for _, kind, count in kinds.items()))
    values |= _values("prompt", zip(map(prompt_features, texts), counts, strict=True))
    values |= _values("target", _described(targets)) | _values("source", _described(sources))
    rejected = records.report.get("rejected", {}).get("total", 0)
    return Profile(accepted=len(records), rejected=rejected, prompts=hashes, values=values)


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
        self._kept = {digest: self._kept[digest] for digest in lowest}
        return [(digest, *self._kept[digest]) for digest in lowest]


def _described(images: _Sample[Picture]) -> list[tuple[dict[str, float], int]]:
    items = images.items()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        pixels = pool.map(image_features, (path for _, (path, _), _ in items))
        return [(features | size, count) for features, (_, (_, size), count) in zip(pixels, items, strict=True)]


def _values(role: str, described: Iterable[tuple[dict[str, float], int]]) -> dict[str, Values]:
    pairs: dict[str, list[tuple[float, int]]] = {}
    for features, count in described:
        for name, value in features.items():
            pairs.setdefault(f"{role}_{name}", []).append((value, count))
    return {name: _distribution(*np.array(weighted, dtype=np.float64).T) for name, weighted in pairs.items()}


def _distribution(values: np.ndarray, counts: np.ndarray) -> Values:
    # Only values that occur, so that whole numbers stay whole.
    quantiles = np.quantile(values, np.linspace(0, 1, QUANTILES), weights=counts, method="inverted_cdf")
    return Values(
        records=int(counts.sum()),
        n=round(float(counts.sum() ** 2 / (counts**2).sum()), 3),
        mean=float(f"{np.average(values, weights=counts):.6g}"),
        quantiles=tuple(float(f"{value:.6g}") for value in quantiles),
    )


def prompt_features(text: str) -> dict[str, float]:
    """Lengths, and shares of characters that tell languages and styles of writing apart."""
    latin, vowels = (sum(map(text.count, letters)) / len(text) for letters in (ascii_lowercase, "aeiou"))
    return {"characters": len(text), "words": len(text.split()), "latin_share": latin, "vowel_share": vowels}


def image_features(path: Path) -> dict[str, float]:
    """Brightness, contrast, colourfulness (Hasler and Suesstrunk, 2003) and sharpness of an image, each from 0."""
    image = read_image(path)
    image = image.reduce(-(-max(image.size) // _MAX_SIDE))
    rgb = np.asarray(image, dtype=np.float64) / 255  # [height, width, 3]
    luma = rgb @ np.array(LUMA)
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
    """``brightness of the target images: mean 0.71 before, 0.42 now; distance 0.88``."""


def check(before: Profile | None, now: Profile, limits: DataChecks) -> list[str]:
    """Returns a sentence for each fault of the data; ``before`` is of the champion's data, if there is a champion."""
    usable, total = counted(now.accepted, "usable record"), now.accepted + now.rejected
    faults = []
    if now.accepted < limits.min_records:
        faults.append((f"{usable}, expected at least {limits.min_records}", "min_records"))
    rejected = now.rejected / max(total, 1)
    shares = [(rejected, f"{now.rejected} of {counted(total, 'record')} rejected: {rejected:.1%}", "max_rejected")]
    if before is not None:
        fewer, lost = 1 - now.accepted / before.accepted, lost_share(before, now)
        shares += [
            (fewer, f"{usable}, {before.accepted} before: {fewer:.1%} fewer", "max_fewer_records"),
            (lost, f"{lost:.1%} of the earlier prompts are gone", "max_lost_prompts"),
        ]
    for share, text, limit in shares:
        if share > getattr(limits, limit):
            faults.append((f"{text}, expected at most {getattr(limits, limit):.1%}", limit))
    for feature in [] if before is None else drift(before, now):
        allowed = max(getattr(limits, feature.limit), feature.chance)
        if feature.distance > allowed:
            faults.append((f"{feature.text}, expected at most {allowed:.2f}", feature.limit))
    return [f"{text} (retrain.data.{limit})." for text, limit in faults]


def drift(before: Profile, now: Profile) -> list[Drift]:
    """Compares the features that both profiles have."""
    return [_drift(name, old, now.values[name]) for name, old in before.values.items() if name in now.values]


def lost_share(before: Profile, now: Profile) -> float:
    """Estimates the share of the earlier prompts that are gone, 0..1, from those whose hashes both samples cover."""
    has_all = len(now.prompts) < MAX_PROMPTS
    covered = {digest for digest in before.prompts if has_all or digest <= now.prompts[-1]}
    return len(covered - set(now.prompts)) / len(covered) if covered else 0.0


def _drift(name: str, before: Values, now: Values) -> Drift:
    """Kolmogorov-Smirnov: the largest difference, over all bounds, of the shares of numbers below a bound."""
    distance = float(stats.ks_2samp(before.quantiles, now.quantiles, method="asymp").statistic)
    # Both samples count as often repeated as the less repeated one: data that have shrunk to one prompt would otherwise
    # be a sample of one, of which nothing can be said.
    repeated = min(profile.records / profile.n for profile in (before, now))
    scatter = repeated / before.records + repeated / now.records
    chance = float(stats.kstwobign.isf(_FALSE_ALARM)) * math.sqrt(scatter)
    role, _, feature = name.partition("_")
    whose, limit = _ROLES[role]
    means = f"mean {before.mean:.4g} before, {now.mean:.4g} now"
    text = f"{feature.replace('_', ' ')} of the {whose}: {means}; distance {distance:.2f}"
    return Drift(name, distance, min(1.0, chance), limit, text)
