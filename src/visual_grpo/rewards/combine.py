"""Several rewards as one weighted score."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from visual_grpo.common.device import in_thread
from visual_grpo.common.errors import Problems, UserError, counted, nearest_hint
from visual_grpo.common.types import (
    Fraction,
    Needs,
    PromptRecord,
    RewardOutput,
    Sample,
    Scores,
    checked_record,
    weighted_total,
)
from visual_grpo.rewards.reward import FunctionReward, PlainReward

RAW = "raw"
"""Name of the part with a reward's scores before clipping and conditions."""
_EXAMPLE = 'For example: RewardSet({"redness": (redness, 1.0)})'


@dataclass(frozen=True, kw_only=True)
class ClipAndConditions:
    """Clipping and conditions of one reward."""

    clip: tuple[float | None, float | None] = (None, None)
    """(low, high), to which scores are clamped; None = no limit."""
    only_where: Mapping[str, float] = field(default_factory=dict)
    """Other reward -> its least score; below it, this reward counts as the worst of its range.

    Conditioned rewards of GDPO (arXiv 2601.05242): an easy reward is worth nothing without a hard one.
    """

    def check(self, name: str, weight: float, rewards: Mapping[str, FunctionReward]) -> None:
        """Raises UserError if this cannot be applied to the reward ``name`` of this weight among ``rewards``."""
        low, high = self.clip
        if low is not None and high is not None and not low < high:
            raise UserError(f"rewards.{name}.clip must be [low, high] with low < high, got [{low:g}, {high:g}]")
        for other in self.only_where:
            if other == name or other not in rewards:
                raise UserError(
                    f"rewards.{name}.only_where names {other!r}, which is not one of the other rewards."
                    f"{nearest_hint(other, [known for known in rewards if known != name])}"
                )
            if rewards[other].judge_of is not None and rewards[name].judge_of is None:
                raise UserError(
                    f"rewards.{name}.only_where names {other!r}, a judge, and judges do not score rollouts. Name a"
                    " reward that is not a judge"
                )
        if self.only_where and self._worst(weight) is None:
            end = "upper" if weight < 0 else "lower"
            raise UserError(
                f"rewards.{name}.only_where: where the other rewards are not satisfied, the reward counts as the worst"
                f" of its range, and rewards.{name}.clip has no {end} end. Give it one, such as clip: [0, 1]"
            )

    def apply(self, values: Tensor, weight: float, scored: Mapping[str, Tensor]) -> Tensor:
        """The [B] scores that count, by all rewards' raw scores; NaN where the sample or a condition is unscored."""
        low, high = self.clip
        if low is not None or high is not None:
            values = values.clamp(low, high)
        worst = self._worst(weight)
        for other, least in self.only_where.items():
            assert worst is not None, "check has been called"
            values = values.masked_fill(scored[other] < least, worst).masked_fill(scored[other].isnan(), torch.nan)
        return values

    def _worst(self, weight: float) -> float | None:
        low, high = self.clip
        return high if weight < 0 else low


class RewardSet:
    """Named rewards with their weights, as a `Scorer`.

    ``rewards`` maps a name to (reward, weight); a reward is a ``FunctionReward`` or a plain function. Weight 0 means
    reported only, a negative weight means that lower is better. ``counting`` clips or conditions rewards, whose raw
    scores then are the part ``raw``. Raises ``UserError`` if all weights are 0.
    """

    def __init__(
        self,
        rewards: Mapping[str, tuple[PlainReward, float]],
        counting: Mapping[str, ClipAndConditions] = MappingProxyType({}),
    ) -> None:
        if not isinstance(rewards, Mapping):
            raise UserError(f"rewards must map names to (reward, weight), got {type(rewards).__name__}. {_EXAMPLE}")
        for name, pair in rewards.items():
            if not (isinstance(pair, Sequence) and len(pair) == 2 and isinstance(pair[1], int | float | np.number)):
                raise UserError(f"reward {name!r} must be (reward, weight), got {pair!r}. {_EXAMPLE}")
        for name, (_, weight) in rewards.items():
            if name == "total" or "/" in name:
                raise UserError(f"a reward cannot be named {name!r}: 'total' and '/' name results in the reports")
            if not math.isfinite(weight):
                raise UserError(f"the weight of reward {name!r} must be a finite number, got {weight}")
        if not any(weight for _, weight in rewards.values()):
            raise UserError(f"nothing to optimise: the rewards {sorted(rewards)} all have weight 0; give one a weight")
        self.weights = {name: float(weight) for name, (_, weight) in rewards.items()}
        self.functions = {name: _named(name, function) for name, (function, _) in rewards.items()}
        self.counting = {name: rule for name, rule in counting.items() if rule != ClipAndConditions()}
        for name, rule in self.counting.items():
            rule.check(name, self.weights[name], self.functions)

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> Scores:
        """Scores B samples; ``total`` is NaN where a reward with a weight is unscored."""
        return self.begin(prompts, samples)()

    def begin(self, prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> Callable[[], Scores]:
        """Starts the rewards that wait for other processes; returns a function that computes the rest and all scores,
        to be called before the next ``begin``."""
        prompts = [checked_record(record) for record in prompts]
        _check_ids(prompts)
        begun = {
            name: in_thread(partial(function, prompts, samples), f"reward-{name}")
            for name, function in self.functions.items()
            if function.waits
        }

        def finish() -> Scores:
            here = {name: function(prompts, samples) for name, function in self.functions.items() if name not in begun}
            outputs = here | {name: future.result() for name, future in begun.items()}
            return self.combined({name: outputs[name] for name in self.weights})

        return finish

    def combined(self, outputs: Mapping[str, RewardOutput]) -> Scores:
        """Combines the outputs of all rewards for the same samples."""
        scored = {name: output.values for name, output in outputs.items()}
        clipped = {name: rule.apply(scored[name], self.weights[name], scored) for name, rule in self.counting.items()}
        values = scored | clipped
        parts = {f"{name}/{RAW}": scored[name] for name in self.counting}
        ratios: dict[str, Fraction] = {}
        for name, output in outputs.items():
            parts |= {f"{name}/{part}": part_values for part, part_values in output.parts.items()}
            ratios |= {f"{name}/{ratio}": pair for ratio, pair in output.ratios.items()}
        total = weighted_total(values, self.weights)
        return Scores(total=total, rewards=values, parts=parts, ratios=ratios, weights=self.weights)

    @property
    def needs_whole_groups(self) -> bool:
        """True if a reward compares the samples of a prompt, so that all must come in one call."""
        return bool(self.comparing)

    @property
    def comparing(self) -> list[str]:
        """The rewards that compare the samples of a prompt."""
        return [name for name, function in self.functions.items() if function.needs.whole_groups]

    @property
    def measures(self) -> dict[str, str]:
        """The parts ``NAME/PART`` that say in the task's terms how many samples are right, and what they are called."""
        named = ((n, function.measure) for n, function in self.functions.items() if function.judge_of is None)
        return {f"{name}/{measure[0]}": measure[1] for name, measure in named if measure is not None}

    @property
    def guards(self) -> dict[str, str]:
        """The rewards that are not optimised and whose fall says that pictures got worse, with what it says of them."""
        named = ((n, function.guard) for n, function in self.functions.items() if not self.weights[n])
        return {name: guard for name, guard in named if guard is not None}

    @property
    def judges(self) -> dict[str, str]:
        """Each judge with what it judges: ``total`` or a reward."""
        return {name: f.judge_of for name, f in self.functions.items() if f.judge_of is not None}

    def without_judges(self) -> RewardSet:
        """Returns what rollouts are scored by."""
        kept = {name: self.weights[name] for name in self.functions if name not in self.judges}
        counting = {name: rule for name, rule in self.counting.items() if name in kept}
        return RewardSet({name: (self.functions[name], weight) for name, weight in kept.items()}, counting)

    def picture(self, record: PromptRecord, sample: Sample) -> Tensor | None:
        """The first painting reward's picture of a text, uint8 [3, h, w]; None if none paints."""
        painting = next((function for function in self.functions.values() if function.paints), None)
        return None if painting is None else painting.picture(record, sample)

    def weighted(self, weights: Mapping[str, float]) -> RewardSet:
        """Returns the same rewards with other weights."""
        return RewardSet({name: (function, weights[name]) for name, function in self.functions.items()}, self.counting)

    def check_machine(self) -> None:
        """Raises UserError listing what each reward lacks on this machine: weights, a server, a device."""
        problems = Problems()
        for function in self.functions.values():
            with problems.collect():
                function.check_machine()
        problems.raise_if_any()

    def check_samples(self, *, videos: bool) -> None:
        """Raises UserError listing the rewards that do not judge such samples."""
        problems = Problems()
        for function in self.functions.values():
            with problems.collect():
                function.check_samples(videos=videos)
        problems.raise_if_any()

    def check_records(self, records: Iterable[PromptRecord]) -> None:
        """Raises UserError listing the records that a reward cannot judge, such as those without a target it needs.

        A judge leaves these unscored.
        """
        functions = list(self.functions.values())
        # Several rewards read them: an iterator would be empty for all but the first.
        records = records if isinstance(records, Sequence) else list(records)
        problems = Problems()
        for function in functions:
            with problems.collect():
                function.check_records(records)
        others = [function for function in functions if function.judge_of is None]
        for kind, need in {"target": Needs(target=True), "source": Needs(source=True)}.items():
            comparing = [function.name for function in others if getattr(function.needs, kind)]
            with problems.collect():
                _check_images(comparing, kind, [record.id for record in records if need.missing(record)])
        problems.raise_if_any()


def _check_ids(prompts: Sequence[PromptRecord]) -> None:
    """Raises UserError where records of one id differ: rewards read targets, and find groups, by id."""
    first: dict[str, PromptRecord] = {}
    for record in prompts:
        known = first.setdefault(record.id, record)
        for what in ("prompt", "source_images", "target_image"):
            if getattr(known, what) != getattr(record, what):
                raise UserError(
                    f"two records have the id {record.id!r} and a different {what}. Give each record its own id"
                )


def _check_images(rewards: Sequence[str], kind: str, missing: Sequence[str]) -> None:
    if not rewards or not missing:
        return
    without = f"{counted(len(missing), 'record')} {'has' if len(missing) == 1 else 'have'}"
    raise UserError(
        f"the reward{'s' * (len(rewards) > 1)} {', '.join(rewards)} compare{'s' * (len(rewards) == 1)} with a {kind}"
        f" image, and {without} none: {', '.join(map(repr, missing[:5]))}{' ...' * (len(missing) > 5)}."
        f" Add {kind}_image to them or remove the reward"
    )


def _named(name: str, function: PlainReward) -> FunctionReward:
    if not isinstance(function, FunctionReward):
        return FunctionReward(name, function)
    if function.name == name:
        return function
    # Wraps the callable, whose optional methods are looked up.
    named = FunctionReward(name, function.function, max_failed_share=function.budget.share)
    named.judge_of = function.judge_of
    return named
