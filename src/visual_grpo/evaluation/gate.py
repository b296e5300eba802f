"""Decides whether a candidate replaces the champion: one-sided t-bounds on paired differences, for a gate that repeats.

All bounds have the level ``alpha = error / gates_per_year``. By Bonferroni's inequality, which holds under any
dependence between the gates, a year of gates on the same prompts promotes a candidate that is not better with a
probability of ``error`` at most, as far as Student's t keeps its level. A candidate must meet *every* condition, so a
wrong promotion needs an error in whichever condition is false in truth: testing all of them at the same level needs no
further correction (an intersection-union test: Berger, Technometrics, 1982).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import pandas as pd

from visual_grpo.errors import UserError, nearest_hint
from visual_grpo.evaluation.compare import STOCK, Sides, independent, join
from visual_grpo.evaluation.gate_decision import Condition, GateDecision
from visual_grpo.evaluation.paired import PairedDifference, paired_difference
from visual_grpo.evaluation.power import detectable_gain
from visual_grpo.types import PromptRecord

Groups = Mapping[str, Mapping[str, Collection[str]]]
"""Metadata key -> value -> ids of the records that have it."""


@dataclass(frozen=True, kw_only=True)
class GateRule:
    """What a candidate must show, against each reference."""

    error: float = 0.05
    """Probability that a year of gates promotes a candidate that is not better."""
    gates_per_year: int = 52
    margin: float = 0.0
    """The total's lower bound must be above it."""
    max_guard_fall: float = 0.25
    """Largest fall of a guard, as a share of the reference's mean."""
    max_unscored_rise: float = 0.02
    """Largest rise of the share of samples that could not be scored."""
    subgroups: Mapping[str, float] = field(default_factory=dict)
    """Metadata key -> largest fall of the total among the records that share a value of it."""

    def __post_init__(self) -> None:
        limits = (self.margin, self.max_guard_fall, self.max_unscored_rise, *self.subgroups.values())
        if not (0 < self.error < 0.5 and self.gates_per_year >= 1 and all(limit >= 0 for limit in limits)):
            raise ValueError(f"expected 0 < error < 0.5, at least one gate a year and no limit below 0, got {self}")

    @property
    def alpha(self) -> float:
        """One-sided level of every bound of one gate."""
        return self.error / self.gates_per_year


def decide(
    candidate: pd.DataFrame, references: Mapping[str, pd.DataFrame], rule: GateRule, groups: Groups | None = None
) -> GateDecision:
    """Judges the candidate's scores against those of each reference on the same samples.

    Each of the following must hold against every reference: the total's lower bound is above the margin; no guard (a
    reward of weight 0), no named subgroup and no share of unscored samples is worse than its limit, by its bound.
    Because the base model is a reference too, a guard cannot be worn down a little with every promotion.

    Bounds are over what is held out together (`paired`). Unscored samples are left out of means and counted by a
    separate condition. What cannot be judged, with fewer than two units, does not hold.

    Args:
        candidate: scores as of ``generate.read_scores``, of one split at the stock sampler.
        references: name -> scores of the same samples: the champion's, the base model's.
        groups: as of ``subgroups_of``, with the keys of ``rule.subgroups``.

    Raises ``UserError`` unless all tables contain the same samples and scores, and every subgroup's key is in
    ``groups``.
    """
    _check(candidate, references, rule, groups or {})
    pairs = {name: join(table, candidate, _sides(name)) for name, table in references.items()}
    gains, units = {}, []
    for name, rows in pairs.items():
        differences = _unit_differences(rows)
        units.append(len(differences))
        gains[name] = rule.margin + detectable_gain(float(differences.std()), len(differences), rule.alpha)
    return GateDecision(
        conditions=tuple(c for name, rows in pairs.items() for c in _conditions(name, rows, candidate, rule, groups)),
        error=rule.error,
        gates_per_year=rule.gates_per_year,
        alpha=rule.alpha,
        prompts=candidate["id"].nunique(),
        units=min(units),
        detectable_gain=gains,
    )


def subgroups_of(records: Iterable[PromptRecord], keys: Iterable[str]) -> dict[str, dict[str, set[str]]]:
    """Metadata key -> value as text -> ids of the records that have it; a record without the key is in no subgroup.

    Raises ``UserError`` for a key that no record has.
    """
    found: dict[str, dict[str, set[str]]] = {key: {} for key in keys}
    known: set[str] = set()
    for record in records:
        known |= record.metadata.keys()
        for key in record.metadata.keys() & found.keys():
            found[key].setdefault(str(record.metadata[key]), set()).add(record.id)
    for key in found:
        if not found[key]:
            has = f"their keys are {', '.join(sorted(known))}" if known else "they have no metadata"
            raise UserError(
                f"subgroups of the gate: none of the judged records has {key!r} in its metadata; {has}."
                f"{nearest_hint(key, known)}"
            )
    return found


def _check(candidate: pd.DataFrame, references: Mapping[str, pd.DataFrame], rule: GateRule, groups: Groups) -> None:
    if not references:
        raise ValueError("expected at least one reference, such as the base model's scores")
    views = set(candidate[["sampler", "split"]].itertuples(index=False, name=None))
    if len(views) != 1 or next(iter(views))[0] != STOCK:
        listed = ", ".join(f"{sampler}/{split}" for sampler, split in sorted(views)) or "no samples"
        raise UserError(f"the gate judges the samples of one split at the {STOCK} sampler, got {listed}")
    if "weights" not in candidate.attrs:
        raise UserError(
            "the candidate's scores lack the weights of their rewards (DataFrame.attrs). Read them with"
            " generate.read_scores, and keep attrs where rows are chosen"
        )
    for key in rule.subgroups:
        if key not in groups:
            raise UserError(f"subgroups of the gate: no groups were given for {key!r}.{nearest_hint(key, groups)}")


def _sides(reference: str) -> Sides:
    return Sides(
        f"scores of {reference}",
        "scores of the candidate",
        "The gate needs all of them drawn in one job: of the same prompts, with the same seeds and rewards",
    )


def _conditions(
    against: str, pairs: pd.DataFrame, candidate: pd.DataFrame, rule: GateRule, groups: Groups | None
) -> Iterator[Condition]:
    """``pairs``: of `join`, the reference as baseline."""
    found = _measured(pairs, "total", rule)
    yield _condition(against, "total", "total", found, found.ci_low, ">", rule.margin)
    yield _unscored(against, pairs, "total", rule)
    for guard in (name for name, weight in candidate.attrs["weights"].items() if not weight):
        found = _measured(pairs, f"reward/{guard}", rule)
        limit = -rule.max_guard_fall * abs(found.baseline_mean)
        yield _condition(against, f"guard/{guard}", guard, found, found.ci_low, ">=", limit)
        if _missing(pairs, f"reward/{guard}").to_numpy().any():
            yield _unscored(against, pairs, f"reward/{guard}", rule)
    for key, fall in rule.subgroups.items():
        for value, ids in (groups or {})[key].items():
            found = _measured(pairs[pairs["id"].isin(list(ids))], "total", rule)
            what = f"total where {key} is {value}"
            yield _condition(against, f"subgroup/{key}={value}", what, found, found.ci_low, ">=", -fall)


def _unscored(against: str, pairs: pd.DataFrame, column: str, rule: GateRule) -> Condition:
    """That the share of samples without this score has not risen."""
    missing = _missing(pairs, column)
    found = paired_difference(missing["baseline"], missing["trained"], independent(pairs), 1 - 2 * rule.alpha)
    if not missing.to_numpy().any():
        found = replace(found, ci_high=0.0)  # Nothing can have risen, on a single prompt neither.
    score = column.removeprefix("reward/")
    name, what = ("unscored", "unscored share") if score == "total" else (f"unscored/{score}", f"share without {score}")
    return _condition(against, name, what, found, found.ci_high, "<=", rule.max_unscored_rise)


def _missing(pairs: pd.DataFrame, column: str) -> pd.DataFrame:
    return pd.DataFrame({side: pairs[f"{column}_{side}"].isna() for side in ("baseline", "trained")})


def _measured(pairs: pd.DataFrame, column: str, rule: GateRule) -> PairedDifference:
    """Each end of the interval is a one-sided bound of level ``rule.alpha``."""
    before, after = pairs[f"{column}_baseline"], pairs[f"{column}_trained"]
    return paired_difference(before, after, independent(pairs), 1 - 2 * rule.alpha)


def _condition(
    against: str, name: str, what: str, found: PairedDifference, bound: float, relation: str, limit: float
) -> Condition:
    return Condition(
        name=name,
        against=against,
        what=what,
        units=found.units,
        reference=found.baseline_mean,
        candidate=found.trained_mean,
        difference=found.difference,
        bound=bound,
        relation=relation,
        limit=limit,
    )


def _unit_differences(pairs: pd.DataFrame) -> pd.Series:
    """Mean difference of the total of each unit with a scored pair."""
    differences = (pairs["total_trained"] - pairs["total_baseline"]).astype("float64")
    return differences.groupby(independent(pairs)).mean().dropna()
