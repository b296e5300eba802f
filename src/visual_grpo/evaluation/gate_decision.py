"""What the gate says: each condition with its bound and limit, the decision, and what so many prompts can detect."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from visual_grpo.errors import counted
from visual_grpo.evaluation.doubts import FEW_NOTE
from visual_grpo.evaluation.headline import decimals
from visual_grpo.evaluation.power import POWER
from visual_grpo.records.split import FEW_PROMPTS

FEW_UNITS = 100
"""With fewer independent prompts the decision says what gain they can detect."""
_LISTED = 3
"""How many failed conditions a sentence names."""
_HOLDS = {">": operator.gt, ">=": operator.ge, "<=": operator.le}
_WORDS = {">": "above", ">=": "at least", "<=": "at most"}


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One thing that a candidate must show against one reference; NaN where it is undefined."""

    name: str
    """``total``, ``unscored``, ``guard/NAME``, ``unscored/NAME`` of a guard that some samples lack, or
    ``subgroup/KEY=VALUE``."""
    against: str
    """Name of the reference."""
    what: str
    """What was measured, in words."""
    units: int
    """Number of independent prompts (or groups held out together) with a scored pair."""
    reference: float
    """Mean of the reference."""
    candidate: float
    """Mean of the candidate."""
    difference: float
    """Candidate minus reference."""
    bound: float
    """One-sided bound of the difference at the gate's level: a lower one, or with the relation ``<=`` an upper one."""
    relation: str
    """``>``, ``>=`` or ``<=``: how ``bound`` must relate to ``limit``."""
    limit: float

    @property
    def holds(self) -> bool:
        """False where the bound is undefined."""
        return bool(_HOLDS[self.relation](self.bound, self.limit))

    @property
    def sentence(self) -> str:
        """``total against champion: +0.031, lower bound +0.012, required above 0.000: holds``."""
        verdict = "holds" if self.holds else "does not hold"
        if math.isnan(self.bound):
            found = f"{counted(self.units, 'independent prompt')} with scores, and a bound needs 2"
            return f"{self.what} against {self.against}: {found}: {verdict}"
        distances = {"difference": self.difference, "ci_low": self.bound, "ci_high": self.bound - self.limit}
        digits = decimals(distances)  # Enough of them to tell the bound from the limit.
        side = "upper" if self.relation == "<=" else "lower"
        found = f"{self.difference:+z.{digits}f}, {side} bound {self.bound:+z.{digits}f}"
        required = f"required {_WORDS[self.relation]} {self.limit:z.{digits}f}"
        return f"{self.what} against {self.against}: {found}, {required}: {verdict}"

    def as_json(self) -> dict[str, Any]:
        """Fields, ``holds`` and ``sentence``; None = undefined."""
        return _without_nan(asdict(self)) | {"holds": self.holds, "sentence": self.sentence}


@dataclass(frozen=True, kw_only=True)
class GateDecision:
    """Whether the candidate is promoted, and why."""

    conditions: tuple[Condition, ...]
    error: float
    gates_per_year: int
    alpha: float
    """Level of each bound: ``error / gates_per_year``."""
    prompts: int
    """Number of prompts that were drawn."""
    units: int
    """Number of independent ones with a scored pair."""
    detectable_gain: Mapping[str, float]
    """Reference -> the true gain over it that a gate of these prompts, of this spread, detects with a probability of
    `POWER`; NaN with fewer than two units."""

    @property
    def promoted(self) -> bool:
        return all(condition.holds for condition in self.conditions)

    @property
    def failed(self) -> list[Condition]:
        return [condition for condition in self.conditions if not condition.holds]

    @property
    def sentence(self) -> str:
        """The decision and its reason."""
        where = f"on {counted(self.prompts, 'prompt')}, each bound at level {self.alpha:.2g}"
        if self.promoted:
            gains = "; ".join(condition.sentence for condition in self.conditions if condition.name == "total")
            return f"Promoted: all {counted(len(self.conditions), 'condition')} hold {where}. {_capital(gains)}."
        failed = self.failed
        more = f"; and {len(failed) - _LISTED} more" if len(failed) > _LISTED else ""
        reasons = "; ".join(condition.sentence for condition in failed[:_LISTED])
        count = f"{len(failed)} of {counted(len(self.conditions), 'condition')}"
        verb = "does" if len(failed) == 1 else "do"
        return f"Not promoted: {count} {verb} not hold {where}. {_capital(reasons)}{more}."

    @property
    def notes(self) -> list[str]:
        """What a reader must know of the decision: how little few prompts can show."""
        if self.units >= FEW_UNITS:
            return []
        few = f"{counted(self.units, 'independent prompt')} with scores, fewer than {FEW_UNITS}"
        if any(math.isnan(gain) for gain in self.detectable_gain.values()):
            return [f"{few}: too few to detect any gain."]
        unreliable = [f"{FEW_NOTE} Hold out more (data.held_out_share)."] if self.units < FEW_PROMPTS else []
        gains = " and ".join(f"{gain:.2g} over the {name}" for name, gain in self.detectable_gain.items())
        return [*unreliable, f"{few}: a gain is detected with {POWER:.0%} probability only if it is at least {gains}."]

    def as_json(self) -> dict[str, Any]:
        """Everything; None = undefined."""
        return {
            "promoted": self.promoted,
            "sentence": self.sentence,
            "notes": self.notes,
            "error": self.error,
            "gates_per_year": self.gates_per_year,
            "alpha": self.alpha,
            "prompts": self.prompts,
            "units": self.units,
            "detectable_gain": _without_nan(self.detectable_gain),
            "conditions": [condition.as_json() for condition in self.conditions],
        }


def _without_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN."""
    return {key: None if isinstance(v, float) and math.isnan(v) else v for key, v in values.items()}


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
