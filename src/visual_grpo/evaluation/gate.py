"""Decides whether a candidate replaces the champion: one-sided t-bounds on paired differences, for a gate that repeats.

All bounds have the level ``alpha = error / gates_per_year``. By Bonferroni's inequality, which holds under any
dependence between the gates, a year of gates on the same prompts promotes a candidate that is not better with a
probability of ``error`` at most, as far as Student's t keeps its level. A candidate must meet *every* condition, so a
wrong promotion needs an error in whichever condition is false in truth: testing all of them at the same level needs no
further correction (an intersection-union test: Berger, Technometrics, 1982). A judge refuses what it contradicts: the
upper end of its interval in the verdict is below 0.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import pandas as pd
from pydantic_core import to_jsonable_python

from visual_grpo.common.errors import UserError, counted, nearest_hint
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import GateRule
from visual_grpo.data.manifest import FEW_PROMPTS
from visual_grpo.evaluation.comparison import EVAL_SAMPLER, cluster_ids, confidence_of_each, join, judges_of
from visual_grpo.evaluation.paired import POWER, PairedDifference, detectable_gain, paired_difference
from visual_grpo.evaluation.verdict import FEW_NOTE, decimals

Groups = Mapping[str, Mapping[str, Collection[str]]]
"""Metadata key -> value -> ids of the records that have it."""
FEW_UNITS = 100
"""Number of independent prompts below which the decision says what gain they can detect."""
_NAMED = 3
"""The most failed conditions that the sentence explains."""
_RELATIONS = {">": (operator.gt, "above"), ">=": (operator.ge, "at least"), "<=": (operator.le, "at most")}


@dataclass(frozen=True)
class Condition:
    """One thing that a candidate must show against one reference; NaN where it is undefined."""

    against: str
    """The reference."""
    name: str
    """``total``, ``unscored``, ``guard/NAME``, ``unscored/NAME`` of a guard that some samples lack, ``judge/NAME``, or
    ``subgroup/KEY=VALUE``."""
    what: str
    """The measured quantity, in words."""
    measured: PairedDifference
    """Its difference; ``trained`` is the candidate, ``baseline`` the reference."""
    relation: str
    """``>``, ``>=`` or ``<=``: how ``bound`` must relate to ``limit``."""
    limit: float
    side: str = "lower"
    """``lower`` or ``upper``: which end of the interval is ``bound``."""

    @property
    def bound(self) -> float:
        """One-sided bound of the difference at the gate's level; of a judge, the end of its interval in the verdict."""
        return self.measured.ci_high if self.side == "upper" else self.measured.ci_low

    @property
    def holds(self) -> bool:
        """False where the bound is undefined."""
        return bool(_RELATIONS[self.relation][0](self.bound, self.limit))

    @property
    def sentence(self) -> str:
        """``total against champion: +0.031, lower bound +0.012, required above 0.000: holds``."""
        about, verdict = f"{self.what} against {self.against}", "holds" if self.holds else "does not hold"
        units, difference = counted(self.measured.units, "independent prompt"), self.measured.difference
        if math.isnan(self.bound):
            return f"{about}: {units} with scores, and a bound needs 2: {verdict}"
        # Enough digits to tell the bound from the limit.
        digits = decimals({"difference": difference, "ci_low": self.bound, "ci_high": self.bound - self.limit})
        numbers = f"{difference:+z.{digits}f}, {self.side} bound {self.bound:+z.{digits}f}"
        return f"{about}: {numbers}, required {_RELATIONS[self.relation][1]} {self.limit:z.{digits}f}: {verdict}"


@dataclass(frozen=True, kw_only=True)
class GateDecision:
    """The decision to promote the candidate or not, with its reasons."""

    conditions: tuple[Condition, ...]
    alpha: float
    """Level of each bound (`GateRule`)."""
    prompts: int
    """Number of prompts that were generated from."""
    units: int
    """Number of independent prompts with a scored pair."""
    detectable_gain: Mapping[str, float]
    """Reference -> the true gain over it that a gate of these prompts, of this spread, detects with a probability of
    `POWER`; NaN with fewer than two units."""

    @property
    def promoted(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> list[Condition]:
        return [condition for condition in self.conditions if not condition.holds]

    @property
    def sentence(self) -> str:
        """States the decision and its reason: the gains, or the first conditions that do not hold."""
        confidence = f"{100 * (1 - self.alpha):.4g}%"
        where = f"on {counted(self.prompts, 'prompt')}, where each bound holds with {confidence} confidence"
        if any(condition.name.startswith("judge/") for condition in self.conditions):
            where += ", bounds of judges as in the verdict"
        count, failed = counted(len(self.conditions), "condition"), self.failed
        if failed:
            conditions, decision = failed[:_NAMED], f"Not promoted: {len(failed)} of {count} failed"
        else:
            conditions, decision = [c for c in self.conditions if c.name == "total"], f"Promoted: all {count} hold"
        reasons = "; ".join(condition.sentence for condition in conditions)
        return f"{decision} {where}. {reasons[:1].upper()}{reasons[1:]}."

    @property
    def notes(self) -> list[str]:
        """Warns that few prompts can detect large gains only."""
        if self.units >= FEW_UNITS:
            return []
        few = f"{counted(self.units, 'independent prompt')} with scores, fewer than {FEW_UNITS}"
        if self.units < 2:
            return [f"{few}: too few to detect any gain."]
        unreliable = (
            [f"{FEW_NOTE} Add records or, of many, hold out more (data.held_out_share)."]
            if self.units < FEW_PROMPTS
            else []
        )
        gains = " and ".join(f"{gain:.2g} over the {name}" for name, gain in self.detectable_gain.items() if gain)
        told = f": a gain is detected with {POWER:.0%} probability only if it is at least {gains}" if gains else ""
        return [*unreliable, f"{few}{told}."]

    def as_json(self) -> dict[str, Any]:
        """Returns everything as JSON; None = undefined, since JSON has no NaN."""
        conditions = [asdict(c) | {"bound": c.bound, "holds": c.holds, "sentence": c.sentence} for c in self.conditions]
        summary = {"promoted": self.promoted, "sentence": self.sentence, "notes": self.notes}
        values: dict[str, Any] = to_jsonable_python(
            summary | asdict(self) | {"conditions": conditions}, inf_nan_mode="null"
        )
        return values


def decide(
    candidate: pd.DataFrame, references: Mapping[str, pd.DataFrame], rule: GateRule, groups: Groups | None = None
) -> GateDecision:
    """Judges the candidate's scores against those of each reference on the same samples.

    Against every reference the total's lower bound must be above the margin, no judge may be contradicted, and
    no guard (another reward of weight 0), named subgroup or share of unscored samples may be worse than its limit, by
    its bound. What cannot be judged, with fewer than two units, does not hold; a judge that scores neither model's
    samples, such as one of target images where no prompt has any, has no condition.

    Args:
        candidate: scores as of ``read_scores``, of one split at the eval sampler.
        references: name -> scores of the same samples: the champion's, the base model's.
        groups: as of ``subgroups_of``, with the keys of ``rule.subgroups``.

    Raises:
        UserError: the tables do not contain the same samples and scores.
    """
    views = sorted(set(candidate[["sampler", "split"]].itertuples(index=False, name=None)))
    if len(views) != 1 or views[0][0] != EVAL_SAMPLER:
        listed = ", ".join(map("/".join, views)) or "no samples"
        raise UserError(f"the gate judges the samples of one split at the {EVAL_SAMPLER} sampler, got {listed}")
    if "weights" not in candidate.attrs:
        raise UserError("the candidate's scores lack the weights of their rewards: keep DataFrame.attrs of read_scores")
    judges = judges_of(candidate)
    guards = [name for name, weight in candidate.attrs["weights"].items() if not weight and name not in judges]
    conditions: list[Condition] = []
    gains, units = {}, []
    for name, table in references.items():
        pairs = join(table, candidate)
        conditions += _conditions(name, pairs, guards, judges, rule, groups or {})
        differences = (pairs["total_trained"] - pairs["total_baseline"]).astype("float64")
        of_units = differences.groupby(cluster_ids(pairs)).mean().dropna()
        units.append(len(of_units))
        gains[name] = rule.margin + detectable_gain(float(of_units.std()), len(of_units), rule.alpha)
    return GateDecision(
        conditions=tuple(conditions),
        alpha=rule.alpha,
        prompts=candidate["id"].nunique(),
        units=min(units),
        detectable_gain=gains,
    )


def subgroups_of(records: Iterable[PromptRecord], keys: Iterable[str]) -> dict[str, dict[str, set[str]]]:
    """Maps metadata key -> value as text -> ids of its records. Raises UserError for a key that no record has."""
    groups: dict[str, dict[str, set[str]]] = {key: {} for key in keys}
    known: set[str] = set()
    for record in records:
        known |= record.metadata.keys()
        for key in record.metadata.keys() & groups.keys():
            groups[key].setdefault(str(record.metadata[key]), set()).add(record.id)
    for key in groups.keys() - known:
        raise UserError(
            f"subgroups of the gate: none of the judged records has {key!r} in its metadata; their keys are:"
            f" {', '.join(sorted(known)) or 'none'}.{nearest_hint(key, known)}"
        )
    return groups


def _conditions(
    against: str, pairs: pd.DataFrame, guards: Iterable[str], judges: Collection[str], rule: GateRule, groups: Groups
) -> Iterator[Condition]:
    """Judges ``pairs`` of `join`, with the reference as baseline."""
    condition = partial(Condition, against)
    level = 1 - 2 * rule.alpha  # Each end of the interval is a one-sided bound of level alpha.
    measured = _difference(pairs, "total", level)
    yield condition("total", "total", measured, ">", rule.margin)
    missing = _unscored(pairs, "total", level)
    yield condition("unscored", "unscored share", missing, "<=", rule.max_unscored_rise, "upper")
    for guard in guards:
        measured, missing = _difference(pairs, f"reward/{guard}", level), _unscored(pairs, f"reward/{guard}", level)
        yield condition(f"guard/{guard}", guard, measured, ">=", -rule.max_guard_fall * abs(measured.baseline))
        if missing.baseline or missing.trained:
            yield condition(
                f"unscored/{guard}", f"share without {guard}", missing, "<=", rule.max_unscored_rise, "upper"
            )
    for judge in judges:
        scored = pairs[[f"reward/{judge}_{side}" for side in ("baseline", "trained")]].notna().any(axis=1)
        if len({*cluster_ids(pairs[scored])}) < 2:
            continue  # It scores neither model's samples, as where no prompt has a target image: it refuses nothing.
        measured = _difference(pairs, f"reward/{judge}", confidence_of_each(judges))
        yield condition(f"judge/{judge}", f"judge {judge}", measured, ">=", 0.0, "upper")
    for key, fall in rule.subgroups.items():
        for value, ids in groups[key].items():
            measured = _difference(pairs[pairs["id"].isin(list(ids))], "total", level)
            yield condition(f"subgroup/{key}={value}", f"total where {key} is {value}", measured, ">=", -fall)


def _difference(pairs: pd.DataFrame, column: str, confidence: float) -> PairedDifference:
    before, after = pairs[f"{column}_baseline"], pairs[f"{column}_trained"]
    return paired_difference(before, after, cluster_ids(pairs), confidence)


def _unscored(pairs: pd.DataFrame, column: str, confidence: float) -> PairedDifference:
    """Compares the shares of samples without this score."""
    before, after = (pairs[f"{column}_{side}"].isna() for side in ("baseline", "trained"))
    measured = paired_difference(before, after, cluster_ids(pairs), confidence)
    # Where none is missing nothing can have risen, on a single prompt neither.
    return measured if before.any() or after.any() else replace(measured, ci_high=0.0)
