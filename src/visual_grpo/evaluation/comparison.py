"""Checks that two results pair, joins their scores sample by sample and measures the differences."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

import pandas as pd

from visual_grpo.common.errors import UserError
from visual_grpo.common.types import weighted_total
from visual_grpo.evaluation import CONFIDENCE
from visual_grpo.evaluation.paired import paired_difference, paired_ratio_bootstrap

EVAL_SAMPLER = "eval"
"""The sampler of the plain pipeline."""
KEY = ["sampler", "split", "id", "index", "seed"]
NUMERATOR, DENOMINATOR = "numerator/", "denominator/"


def compare(
    baseline: pd.DataFrame, trained: pd.DataFrame, *, bootstrap_samples: int, seed: int
) -> list[dict[str, Any]]:
    """Returns an entry per score (total, rewards, parts and ratios), split and sampler; None = undefined.

    ``difference`` is trained minus baseline over samples of the same prompt and seed, with a 95% interval over whatever
    is held out together: a prompt, an image or a group (see ``paired``). ``bootstrap_samples`` and ``seed`` are for
    ratios. ``prompts`` counts those with a scored pair, ``all_prompts`` all; ``samples`` all samples of a side,
    ``unscored_baseline`` and ``unscored_trained`` those that could not be scored, and ``unscored_differs`` says whether
    their shares differ (the t-interval excludes 0). A score that is a reward's measure of the task has its name there
    as ``measure``; one that is a guard has as ``guard`` what is wrong where it falls. A judge has ``judge_of`` and the
    ``confidence`` of its interval: by Bonferroni's inequality the intervals of all judges contain the true differences
    at once in 95%.
    Raises ``UserError`` unless both tables contain exactly the same samples and scores.
    """
    return _entries(join(baseline, trained), trained, bootstrap_samples, seed)


def compare_controls(
    baseline: pd.DataFrame, trained: pd.DataFrame, *, bootstrap_samples: int, seed: int
) -> list[dict[str, Any]]:
    """Compares the base model at each control with the trained model at the eval sampler, on held-out prompts.

    Entries are those of `compare`, with the control as ``sampler``."""
    judged = trained[(trained["sampler"] == EVAL_SAMPLER) & (trained["split"] == "held_out")]
    entries = []
    for name in controls_of(baseline):
        base = baseline[baseline["sampler"] == name]
        if len(base):
            # join() pairs equal samplers, and leaves out controls by their names.
            pairs = join(base.assign(sampler=EVAL_SAMPLER), judged).assign(sampler=name)
            entries += _entries(pairs, trained, bootstrap_samples, seed)
    return entries


def controls_of(scores: pd.DataFrame) -> list[str]:
    """Lists the samplers that only the base model has (``evaluation.controls``): ``eval guidance_scale=3``."""
    return [name for name in scores["sampler"].unique() if name.startswith(f"{EVAL_SAMPLER} ")]


def judges_of(scores: pd.DataFrame) -> dict[str, str]:
    """Returns each judge with what it judges: ``total`` or a reward."""
    return dict(scores.attrs.get("judges", {}))


def confidence_of_each(judges: Collection[str]) -> float:
    """Returns the coverage of each judge's interval with which all of them together have `CONFIDENCE`."""
    return 1 - (1 - CONFIDENCE) / max(1, len(judges))


def join(baseline: pd.DataFrame, trained: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per sample: the key, ``prompt``, ``unit``, ``source`` (relative to the baseline's folder, optional)
    and every score, ``file`` and ``answer`` with the suffixes ``_baseline`` and ``_trained``.

    The baseline's total is recomputed with the weights of the trained results: the weights depend on the module that
    was trained, and one baseline is used for every module. The baseline's controls are left out, and the samples that
    it has beyond those that were asked of the trained policy. Raises ``UserError`` unless both tables contain exactly
    the same samples and scores.
    """
    baseline = asked_for(baseline[~baseline["sampler"].isin(controls_of(baseline))], trained)
    weights, relative = trained.attrs["weights"], rankings(trained)
    weights = {name: 0.0 if name in relative else weight for name, weight in weights.items()}
    baseline = retotalled(baseline, weights)
    trained = retotalled(trained, weights) if relative else trained
    _check_same("scores", set(score_columns(baseline)), set(score_columns(trained)))
    for column in KEY:
        _check_same(f"values of {column}", set(baseline[column]), set(trained[column]))
    keys = [list(frame[KEY].itertuples(index=False, name=None)) for frame in (baseline, trained)]
    _check_same("images (sampler, split, id, index, seed)", set(keys[0]), set(keys[1]))
    return baseline.merge(
        trained.drop(columns=["prompt", "unit", "source", "target"], errors="ignore"),
        on=KEY,
        suffixes=("_baseline", "_trained"),
        validate="one_to_one",
    )


def retotalled(scores: pd.DataFrame, weights: Mapping[str, float]) -> pd.DataFrame:
    """Recomputes the total with these weights; NaN where a weighted reward is unscored."""
    used = {name: weight for name, weight in weights.items() if weight}
    asked = {f"reward/{name}" for name in used}
    _check_same("weighted rewards", asked & set(scores), asked)
    return scores.assign(total=weighted_total({name: scores[f"reward/{name}"] for name in used}, used))


def rankings(scores: pd.DataFrame) -> set[str]:
    """Returns the weighted rewards that only rank the samples of a prompt against each other.

    They say that they compare these (`Needs.whole_groups`), and their mean is the same for every prompt although
    samples differ, so that no model can score better than the other. They are left out of the total, unless it has no
    other reward.
    """
    weighted = {name for name, weight in scores.attrs["weights"].items() if weight}
    relative = set()
    for name in sorted(weighted & {*scores.attrs.get("comparing", ())}):
        groups = scores.groupby(["sampler", "id"])[f"reward/{name}"]
        means = groups.mean()
        if len(means) > 1 and means.max() - means.min() < 1e-6 and (groups.max() - groups.min()).max() > 1e-3:
            relative.add(name)
    return relative if relative < weighted else set()


def score_columns(scores: pd.DataFrame) -> dict[str, str]:
    """Maps columns of ``scores.parquet`` to names: total, then each reward with its parts and ratios (numerators)."""
    kinds = ("reward/", "part/", NUMERATOR)
    shown = [column for column in scores.columns if column == "total" or column.startswith(kinds)]
    names = {column: column.removeprefix("reward/").removeprefix("part/").removeprefix(NUMERATOR) for column in shown}
    rewards = list(names.values())
    return dict(sorted(names.items(), key=lambda item: rewards.index(item[1].split("/")[0])))


def _entries(pairs: pd.DataFrame, trained: pd.DataFrame, samples: int, seed: int) -> list[dict[str, Any]]:
    weights, relative, judges = trained.attrs["weights"], rankings(trained), judges_of(trained)
    measures, guards = (trained.attrs.get(name, {}) for name in ("measures", "guards"))
    each = confidence_of_each(judges)
    return [
        {"name": name, "split": split, "sampler": sampler, "optimised": name == "total" or bool(weights.get(name))}
        | ({"ranking": True} if name in relative else {})
        | ({"measure": measures[name]} if name in measures else {})
        | ({"guard": guards[name]} if name in guards else {})
        | ({"judge_of": judges[name], "confidence": each} if name in judges else {})
        | _measure(rows, column, samples, seed, each if name in judges else CONFIDENCE)
        for (sampler, split), rows in pairs.groupby(["sampler", "split"], sort=False)
        for column, name in score_columns(trained).items()
    ]


def _measure(rows: pd.DataFrame, column: str, samples: int, seed: int, confidence: float) -> dict[str, Any]:
    before, after, clusters = rows[f"{column}_baseline"], rows[f"{column}_trained"], cluster_ids(rows)
    if column.startswith(NUMERATOR):
        below = DENOMINATOR + column.removeprefix(NUMERATOR)
        first, second = (before, rows[f"{below}_baseline"]), (after, rows[f"{below}_trained"])
        measured = paired_ratio_bootstrap(first, second, clusters, samples, seed)
    else:
        measured = paired_difference(before, after, clusters, confidence)
    shares = paired_difference(before.isna(), after.isna(), clusters)
    return {
        "prompts": rows["id"][before.notna() & after.notna()].nunique(),
        # JSON has no NaN.
        **{key: None if math.isnan(value) else value for key, value in asdict(measured).items()},
        "all_prompts": rows["id"].nunique(),
        "samples": len(rows),
        "unscored_baseline": int(before.isna().sum()),
        "unscored_trained": int(after.isna().sum()),
        "unscored_differs": shares.ci_low > 0 or shares.ci_high < 0,
    }


def cluster_ids(rows: pd.DataFrame) -> list[str]:
    """Returns the [n] clusters: the smallest id of the records that are held out together, such as all queries about an
    image."""
    units = rows["unit"] if "unit" in rows else rows["id"]
    return list(rows["id"].groupby(units).transform("min"))


def _check_same(what: str, before: set[Any], after: set[Any]) -> None:
    if before != after:
        only = [
            f"{len(extra)} only in the {side} ({', '.join(map(repr, sorted(extra)[:3]))})"
            for side, extra in (("baseline", before - after), ("trained results", after - before))
            if extra
        ]
        raise UserError(
            f"baseline and trained results differ in their {what}: {'; '.join(only)}. Generate the baseline again.",
            remedy="baseline",
        )


def asked_for(baseline: pd.DataFrame, trained: pd.DataFrame) -> pd.DataFrame:
    """Selects the baseline's samples of the samplers, prompts and seeds of ``trained``, which may be fewer."""
    asked = ["sampler", "split", "id", "index"]
    return baseline[pd.MultiIndex.from_frame(baseline[asked]).isin(pd.MultiIndex.from_frame(trained[asked]))]
