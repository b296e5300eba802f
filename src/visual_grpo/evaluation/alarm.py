"""Notices a reward that is cheated: it rises, and what it does not judge gets worse, by more than chance explains.

At every evaluation of a training samples of the eval prompts are generated with the seeds of the baseline. Each
*watched score* (a guard, the unscored share, the distance to the base model's pictures) has a one-sided t-bound of the
paired differences at the level ``error / (looks * scores)``: by Bonferroni's inequality a training in which nothing
exceeds its limit raises an alarm, at any look, with a probability of ``error`` at most. (Group-sequential testing with
equal spending: Jennison & Turnbull, Group Sequential Methods, 2000, chapter 2.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visual_grpo.common.types import PromptRecord, Sample
from visual_grpo.common.videos import frames_of, read_frames
from visual_grpo.config import AlarmConfig
from visual_grpo.evaluation.comparison import EVAL_SAMPLER, judges_of, retotalled
from visual_grpo.evaluation.paired import PairedDifference, paired_difference
from visual_grpo.evaluation.pictures import data_uri
from visual_grpo.evaluation.samples import read_scores

TOTAL, UNSCORED, DISTANCE = "total", "unscored", "distance"
_SIDE = 64
"""Pixels to which pictures are reduced before their distance is measured."""
_SHOWN_SIDE = 1600
_RISE = 0.9
"""Confidence of the total's two-sided interval: an error of 5% at its lower end. The rest limit false alarms."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """The change of one score against the base model on the same prompts and seeds."""

    name: str
    """A guard, `UNSCORED` or `DISTANCE`."""
    change: float
    """Relative to the base model's mean for a guard (-0.3: it fell by 30%); else a difference of shares or pixels."""
    low: float
    high: float
    """One-sided bounds of ``change``; NaN where fewer than two prompts can be compared."""
    limit: float | None
    """A guard's change may not be below it, any other change not above; None = only reported. 0 of a judge."""
    judge_of: str | None = None
    """The score that the judge checks, ``total`` or a reward; None = not a judge."""

    @property
    def is_worse(self) -> bool:
        """Returns True if the change is beyond its limit by more than chance explains."""
        return self._beyond(self.high if self._is_guard else self.low) > 0

    @property
    def beyond(self) -> float:
        """Distance beyond the limit, possibly by chance; 0 within it."""
        return self._beyond(self.change)

    @property
    def sentence(self) -> str:
        if self.name == UNSCORED:
            return f"{self.change:.0%} more of the samples cannot be scored (at least {self.low:.0%})"
        if self.name == DISTANCE:
            return f"the pictures are {self.change:.2f} away from the base model's (at least {self.low:.2f})"
        what = self.name if self.judge_of is None else f"the judge {self.name}"
        return f"{what} fell by {-self.change:.0%} (at least {-self.high:.0%})"

    @property
    def _is_guard(self) -> bool:
        return self.name not in (UNSCORED, DISTANCE)

    def _beyond(self, value: float) -> float:
        if self.limit is None or math.isnan(value):
            return 0.0
        return max(0.0, self.limit - value if self._is_guard else value - self.limit)


@dataclass(frozen=True, kw_only=True)
class InterimAnalysis:
    """One evaluation of a training (an interim look, in group-sequential terms)."""

    watched: tuple[Watched, ...]
    rises: Mapping[str, PairedDifference]
    """The change of the total, and of each reward that a judge is for, on the prompts that both could score."""

    @property
    def risen(self) -> set[str]:
        """Returns the ``rises`` that chance does not explain."""
        return {name for name, measured in self.rises.items() if measured.ci_low > 0}

    @property
    def alarm(self) -> str | None:
        """States why the reward seems to be hacked; None if nothing shows it."""
        # Unscored samples drop out of the total, so their share may rise without a rise of the total.
        worse = [one for one in self.watched if one.is_worse and (_judged(one) in self.risen or one.name == UNSCORED)]
        if not worse:
            return None
        risen = [name for name in dict.fromkeys(map(_judged, worse)) if name in self.risen]
        rises = (
            f"{'the reward' if name == TOTAL else name} rose by {self.rises[name].difference:.3g}, and "
            for name in risen
        )
        return f"{''.join(rises)}{', '.join(one.sentence for one in worse)}"

    @property
    def suspicion(self) -> float:
        """Largest distance of a watched score beyond its limit, possibly by chance; 0 = none."""
        suspect = (one for one in self.watched if self.rises[_judged(one)].difference > 0 or one.name == UNSCORED)
        return max((one.beyond for one in suspect), default=0.0)

    def metrics(self) -> dict[str, float]:
        """Returns ``watch/NAME`` with its bounds, without undefined ones."""
        metrics: dict[str, float] = {}
        for one in self.watched:
            values = {"watch": one.change, "watch_low": one.low, "watch_high": one.high}
            metrics |= {f"{what}/{one.name}": value for what, value in values.items() if not math.isnan(value)}
        return metrics


def _judged(one: Watched) -> str:
    """Returns the score whose rise a watched one makes suspect."""
    return one.judge_of or TOTAL


class HackingMonitor:
    """Compares a training of ``looks`` evaluations with the baseline's samples of the eval prompts.

    ``weights`` are those of the training's total, by which the baseline's is computed again.
    """

    def __init__(self, baseline: Path, rule: AlarmConfig, looks: int, weights: Mapping[str, float]) -> None:
        scores = retotalled(read_scores(baseline), weights)
        rows = scores[(scores["split"] == "eval") & (scores["sampler"] == EVAL_SAMPLER) & (scores["index"] == 0)]
        self.reference = rows.set_index("id")
        self.guards = [name for name, weight in weights.items() if not weight]
        self.judges = judges_of(scores)
        self.folder, self.rule, self.looks = baseline, rule, max(1, looks)
        # Each picture is reduced once; a table keeps nothing of an earlier file.
        self._reduced: Callable[[str, int], Tensor] = cache(
            lambda file, count: _reduced(read_frames(baseline / file, count))
        )

    def look(
        self, records: Sequence[PromptRecord], samples: Sequence[Sample], total: Tensor, rewards: Mapping[str, Tensor]
    ) -> InterimAnalysis:
        """Compares [B] samples at the eval sampler and the baseline's seeds; records without a baseline are left out.

        ``total`` and each of ``rewards`` are [B].
        """
        rows = [row for row, record in enumerate(records) if record.id in self.reference.index]
        before = self.reference.loc[[records[row].id for row in rows]]
        # Each one-sided bound has an equal part of the error.
        level = 1 - 2 * self.rule.error / (self.looks * (len(self.guards) + 1 + (self.rule.max_distance is not None)))

        def now(values: Tensor) -> Tensor:
            return values.double().cpu()[rows]

        compare = partial(paired_difference, clusters=list(before["unit"]), confidence=level)
        watched = []
        for name in self.guards:
            measured, judged = compare(before[f"reward/{name}"], now(rewards[name])), self.judges.get(name)
            # A judge may not fall at all, whatever the base model's mean; a share of 0 is undefined.
            scale = abs(measured.baseline) or (math.nan if judged is None else 1.0)
            limit = -self.rule.max_guard_fall if judged is None else 0.0
            watched.append(replace(_watched(name, measured, limit, scale), judge_of=judged))
        measured = compare(before[TOTAL].isna(), now(total).isnan())
        watched.append(_watched(UNSCORED, measured, self.rule.max_unscored_rise))
        if rows and all(frames_of(samples[row]) is not None for row in rows):
            away = [self._distance(str(file), samples[row]) for file, row in zip(before["file"], rows, strict=True)]
            watched.append(_watched(DISTANCE, compare(np.zeros(len(away)), away), self.rule.max_distance))
        rises = {TOTAL: compare(before[TOTAL], now(total), confidence=_RISE)}
        for name in set(self.judges.values()) - {TOTAL}:
            rises[name] = compare(before[f"reward/{name}"], now(rewards[name]), confidence=_RISE)
        return InterimAnalysis(watched=tuple(watched), rises=rises)

    def files(self, records: Sequence[PromptRecord]) -> list[Path | None]:
        """Returns the base model's picture of each record."""
        known = self.reference["file"]
        return [self.folder / known[record.id] if record.id in known.index else None for record in records]

    def _distance(self, file: str, sample: Sample) -> float:
        """Returns the root mean square difference of pixels in [0, 1] of the reduced pictures or frames."""
        frames = frames_of(sample)
        assert frames is not None, "look"
        return float((self._reduced(file, len(frames)) - _reduced(frames)).square().mean().sqrt())


def _watched(name: str, measured: PairedDifference, limit: float | None, scale: float = 1.0) -> Watched:
    change, low, high = (value / scale for value in (measured.difference, measured.ci_low, measured.ci_high))
    return Watched(name=name, change=change, low=low, high=high, limit=limit)


def _reduced(frames: Tensor) -> Tensor:
    """[F, 3, height, width] -> [F, 3, h, w] float32 in [0, 1] of at most `_SIDE` pixels a side, by averaging areas."""
    pixels = frames.cpu().float() / 255
    size = [min(_SIDE, side) for side in pixels.shape[-2:]]
    return torch.nn.functional.interpolate(pixels, size=size, mode="area")


def picture_of(step: int) -> str:
    """Returns the name of an alarm's picture in the folders of checkpoints and adapters."""
    return f"alarm-{step:06d}.png"


def alarm_notes(training: Mapping[str, Any]) -> list[str]:
    """Returns a sentence for the verdict on adapters whose training raised an alarm."""
    alarms = training.get("alarms", [])
    more = f" (and {len(alarms) - 1} more)" if len(alarms) > 1 else ""
    return [f"Alarm of the training at step {alarm['step']}{more}: {alarm['sentence']}." for alarm in alarms[:1]]


def shown_alarms(training: Mapping[str, Any], adapters: Path | None) -> list[dict[str, Any]]:
    """Returns step, sentence and picture (a data URI, or None) of each alarm."""
    shown = []
    for alarm in training.get("alarms", []):
        file = None if adapters is None else adapters / picture_of(alarm["step"])
        picture = data_uri(file, _SHOWN_SIDE) if file is not None and file.is_file() else None
        shown.append({**alarm, "picture": picture})
    return shown
