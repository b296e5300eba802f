"""Several rewards as one weighted score."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from visual_grpo.errors import Problems, UserError, counted
from visual_grpo.images import is_image
from visual_grpo.rewards.reward import FunctionReward, PlainReward
from visual_grpo.types import PromptRecord, RewardFunction, Sample, Scores, weighted_total


class RewardSet:
    """Named rewards with their weights, as a ``types.Judge``.

    ``rewards`` maps a name to (reward, weight); a reward is a ``types.RewardFunction`` or a plain
    function. Weight 0 means reported only, a negative weight means that lower is better.
    Raises ``UserError`` if no weight differs from 0.
    """

    def __init__(self, rewards: Mapping[str, tuple[RewardFunction | PlainReward, float]]) -> None:
        for name, (_, weight) in rewards.items():
            _check(name, weight)
        if not any(weight for _, weight in rewards.values()):
            raise UserError(f"nothing to optimise: the rewards {sorted(rewards)} all have weight 0; give one a weight")
        self.weights = {name: float(weight) for name, (_, weight) in rewards.items()}
        self.functions = {name: _named(name, function) for name, (function, _) in rewards.items()}

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> Scores:
        """Scores B samples; ``total`` is NaN where a reward with a weight is unscored."""
        outputs = {name: function(prompts, samples) for name, function in self.functions.items()}
        values = {name: output.values for name, output in outputs.items()}
        return Scores(
            total=weighted_total(values, self.weights),
            rewards=values,
            parts={
                f"{name}/{part}": values for name, output in outputs.items() for part, values in output.parts.items()
            },
            ratios={
                f"{name}/{ratio}": pair for name, output in outputs.items() for ratio, pair in output.ratios.items()
            },
            weights=self.weights,
        )

    def picture(self, record: PromptRecord, sample: Sample) -> Tensor | None:
        """An image itself (what is kept is what was scored); of a text what the first reward that paints makes of it.

        A uint8 image [3, h, w]; None for a text that no reward paints.
        """
        if is_image(sample):
            image: Tensor = sample
            return image
        painting = next((function for function in self.functions.values() if function.paints), None)
        return None if painting is None else painting.picture(record, sample)

    def weighted(self, weights: Mapping[str, float]) -> RewardSet:
        """The same rewards with other weights."""
        return RewardSet({name: (function, weights[name]) for name, function in self.functions.items()})

    def check_records(self, records: Iterable[PromptRecord]) -> None:
        """Refuses records that a reward cannot judge, as those without the target it needs; before any rollout.

        Raises UserError with the problems of every reward.
        """
        checking = [function for function in self.functions.values() if function.checks_records]
        needing = [name for name, function in self.functions.items() if function.needs_target]
        if not checking and not needing:
            return
        # Several rewards read them: an iterator would be empty for all but the first.
        records = records if isinstance(records, Sequence) else list(records)
        problems = Problems()
        for function in checking:
            with problems.collect():
                function.check_records(records)
        missing = [record.id for record in records if record.target_image is None] if needing else []
        if missing:
            without = f"{counted(len(missing), 'record')} {'has' if len(missing) == 1 else 'have'}"
            problems.texts.append(
                f"the reward{'s' * (len(needing) > 1)} {', '.join(needing)} compare"
                f"{'s' * (len(needing) == 1)} with a target image, and {without} none:"
                f" {', '.join(map(repr, missing[:5]))}{' ...' * (len(missing) > 5)}."
                " Add target_image to them or remove the reward"
            )
        problems.raise_if_any()


def _named(name: str, function: RewardFunction | PlainReward) -> FunctionReward:
    if not isinstance(function, FunctionReward):
        return FunctionReward(name, function)
    if function.name == name:
        return function
    # Its callable, not itself: what a reward can do beside scoring is asked of the callable.
    return FunctionReward(
        name, function.function, needs_target=function.needs_target, max_failed_share=function.budget.share
    )


def _check(name: str, weight: float) -> None:
    if name == "total" or "/" in name:
        raise UserError(f"a reward cannot be named {name!r}: 'total' and '/' name results in the reports")
    if not math.isfinite(weight):
        raise UserError(f"the weight of reward {name!r} must be a finite number, got {weight}")
