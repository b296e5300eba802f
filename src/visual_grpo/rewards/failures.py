"""A reward whose own code fails once in a while: what it may leave unscored, and when the run stops."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord, RewardOutput, Sample

log = logging.getLogger(__name__)

Score = Callable[[Sequence[PromptRecord], Sequence[Sample]], RewardOutput]
_SHOWN = 5


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
        except RewardCodeError:
            if not self.share or not self.scored:
                raise
        else:
            self._count(name, output, prompts, 1)
            return output
        outputs = []
        for rows in units:
            own = [prompts[row] for row in rows]
            try:
                output = score(own, [samples[row] for row in rows])
            except RewardCodeError as error:
                nothing = torch.full((len(rows),), torch.nan)
                output = RewardOutput(values=nothing, failed=dict.fromkeys(range(len(rows)), str(error)))
            self._count(name, output, own, len(rows))
            outputs.append(output)
        return _joined(outputs)

    def _count(self, name: str, output: RewardOutput, prompts: Sequence[PromptRecord], at_once: int) -> None:
        """Raises RewardCodeError where more failed than the share and than ``at_once``."""
        self.scored += len(prompts) - len(output.failed)
        if not output.failed:
            return
        reason = list(output.failed.values())[-1]
        if not self.share or not self.scored:
            raise RewardCodeError(f"reward {name!r} failed on {len(output.failed)} of {len(prompts)} samples: {reason}")
        self.failed += len(output.failed)
        asked = self.scored + self.failed
        if self.failed > max(float(at_once), self.share * asked):
            raise RewardCodeError(
                f"reward {name!r} failed on {self.failed} of {asked} samples, more than the share {self.share:g} that"
                f" rewards.{name}.max_failed_share allows. The last error: {reason}"
            )
        lost = list(dict.fromkeys(prompts[row].id for row in output.failed))
        more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
        ids = ", ".join(map(repr, lost[:_SHOWN]))
        log.warning("reward %r failed on %s%s, left unscored: %s", name, ids, more, reason.strip().splitlines()[-1])


def _joined(outputs: Sequence[RewardOutput]) -> RewardOutput:
    """What an output lacks, since its code failed, is NaN."""

    def nothing(output: RewardOutput) -> Tensor:
        return torch.full_like(output.values, torch.nan)

    def side(name: str, number: int) -> Tensor:
        pairs = [output.ratios.get(name, (nothing(output),) * 2) for output in outputs]
        return torch.cat([pair[number] for pair in pairs])

    parts = dict.fromkeys(name for output in outputs for name in output.parts)
    ratios = dict.fromkeys(name for output in outputs for name in output.ratios)
    return RewardOutput(
        values=torch.cat([output.values for output in outputs]),
        parts={name: torch.cat([output.parts.get(name, nothing(output)) for output in outputs]) for name in parts},
        ratios={name: (side(name, 0), side(name, 1)) for name in ratios},
    )
