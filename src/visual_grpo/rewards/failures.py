"""A reward whose own code fails once in a while: what it may leave unscored, and when the run stops."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.types import PromptRecord, RewardOutput, Sample

log = logging.getLogger(__name__)

Score = Callable[[Sequence[PromptRecord], Sequence[Sample]], RewardOutput]


class RewardCodeError(UserError):
    """The reward's own code raised an error."""


@dataclass
class FailureBudget:
    """Counts the samples that a reward's code failed on.

    An error before anything was scored is taken for a mistake in the code and is never forgiven.
    """

    share: float = 0.0
    """Of the samples of the run so far, which the failed ones may reach; a single unit may always fail, unless 0."""
    scored: int = 0
    failed: int = 0

    def score(
        self,
        name: str,
        score: Score,
        prompts: Sequence[PromptRecord],
        samples: Sequence[Sample],
        units: Sequence[Sequence[int]],
    ) -> RewardOutput:
        """``score(prompts, samples)``; where that fails, unit by unit, so that one does not take the others along.

        Args:
            units: the rows that can be scored by themselves: single samples or groups, in order.

        Raises RewardCodeError, naming the share, where too many failed.
        """
        try:
            output = score(prompts, samples)
        except RewardCodeError as error:
            if not self.share or not self.scored:
                raise
            return self._one_by_one(name, score, prompts, samples, units, error)
        self._count(name, output, prompts)
        return output

    def _count(self, name: str, output: RewardOutput, prompts: Sequence[PromptRecord]) -> None:
        """Counts the samples of an output, of which the reward itself may have given some up."""
        self.scored += len(prompts) - len(output.failed)
        if not output.failed:
            return
        reason = list(output.failed.values())[-1]
        if not self.share or not self.scored:
            raise RewardCodeError(f"reward {name!r} failed on {len(output.failed)} of {len(prompts)} samples: {reason}")
        self.failed += len(output.failed)
        self._stop_if_too_many(name, reason, 1)
        _warn(name, [prompts[row].id for row in output.failed], reason)

    def _one_by_one(
        self,
        name: str,
        score: Score,
        prompts: Sequence[PromptRecord],
        samples: Sequence[Sample],
        units: Sequence[Sequence[int]],
        error: RewardCodeError,
    ) -> RewardOutput:
        outputs: list[RewardOutput | None] = []
        for rows in units:
            own = [prompts[row] for row in rows]
            try:
                output = score(own, [samples[row] for row in rows])
            except RewardCodeError as again:
                error = again
                outputs.append(None)
                self.failed += len(rows)
                self._stop_if_too_many(name, str(error), len(rows))
            else:
                outputs.append(output)
                self._count(name, output, own)
        lost = [prompts[rows[0]].id for rows, output in zip(units, outputs, strict=True) if output is None]
        if lost:
            _warn(name, lost, str(error).strip().splitlines()[-1])
        return _joined(outputs, [len(rows) for rows in units])

    def _stop_if_too_many(self, name: str, error: str, at_once: int) -> None:
        asked = self.scored + self.failed
        if self.failed > max(float(at_once), self.share * asked):
            raise RewardCodeError(
                f"reward {name!r} failed on {self.failed} of {asked} samples, more than the share {self.share:g} that"
                f" rewards.{name}.max_failed_share allows. The last error: {error}"
            )


def _warn(name: str, lost: Sequence[str], reason: str) -> None:
    more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
    log.warning("reward %r failed on %s%s, left unscored: %s", name, ", ".join(map(repr, lost[:5])), more, reason)


def _joined(outputs: Sequence[RewardOutput | None], sizes: Sequence[int]) -> RewardOutput:
    """Joins outputs of ``sizes`` samples each; None is NaN in everything."""
    whole = [output for output in outputs if output is not None]

    def column(read: Callable[[RewardOutput], Tensor | None]) -> Tensor:
        values = [None if output is None else read(output) for output in outputs]
        filled = zip(values, sizes, strict=True)
        return torch.cat([torch.full((size,), torch.nan) if value is None else value for value, size in filled])

    parts = dict.fromkeys(name for output in whole for name in output.parts)
    ratios = dict.fromkeys(name for output in whole for name in output.ratios)
    return RewardOutput(
        values=column(lambda output: output.values),
        parts={name: column(lambda output: output.parts.get(name)) for name in parts},  # noqa: B023
        ratios={
            name: (column(lambda output: output.ratios[name][0]), column(lambda output: output.ratios[name][1]))  # noqa: B023
            for name in ratios
        },
    )
