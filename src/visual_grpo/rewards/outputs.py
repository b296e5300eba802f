"""Validates what a reward returns, and limits how often its own code may fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Complex, Real
from typing import Any

import torch
from torch import Tensor

from visual_grpo.common.errors import UserError
from visual_grpo.common.types import Fraction, PromptRecord, RewardOutput, Sample


def checked_output(name: str, returned: Any, prompts: Sequence[PromptRecord]) -> RewardOutput:
    """Converts what a reward returned for B samples to [B] float32 tensors on the CPU. Raises UserError."""
    if isinstance(returned, RewardOutput):
        parts = {part: _scores(f"{name}/{part}", values, prompts) for part, values in returned.parts.items()}
        ratios = {ratio: _ratio(f"{name}/{ratio}", pair, prompts) for ratio, pair in returned.ratios.items()}
        values = _scores(name, returned.values, prompts)
        if scored := [row for row in returned.failed if row not in range(len(prompts)) or not values[row].isnan()]:
            raise UserError(
                f"reward {name!r} says that it failed on row {scored[0]}, which has a score or does not exist"
            )
        failed = {row: str(reason).strip() or "no reason given" for row, reason in returned.failed.items()}
        return RewardOutput(values=values, parts=parts, ratios=ratios, failed=failed)
    return RewardOutput(values=_scores(name, returned, prompts))


def _scores(name: str, returned: Any, prompts: Sequence[PromptRecord]) -> Tensor:
    tensor = _as_tensor(name, returned, prompts)
    values = tensor.to(torch.float32)
    if values.shape != (len(prompts),):
        raise UserError(
            f"reward {name!r} must return one score for each of {len(prompts)} samples, got shape"
            f" {list(values.shape)} (records {some_ids(prompts)})"
        )
    if infinite := values.isinf().nonzero().flatten().tolist():
        row = infinite[0]
        raise UserError(
            f"reward {name!r} gave {tensor[row].item()} {_where(row, prompts)}: scores are finite in float32; return"
            " None or NaN for what cannot be scored"
        )
    return values


def _ratio(name: str, returned: Any, prompts: Sequence[PromptRecord]) -> Fraction:
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise UserError(f"ratio {name!r} must be a tuple (numerator, denominator), got {returned!r}")
    above, below = (_scores(name, values, prompts) for values in returned)
    if wrong := ((above.isnan() != below.isnan()) | (below < 0)).nonzero().flatten().tolist():
        row = wrong[0]
        raise UserError(
            f"ratio {name!r} is {above[row].item()} / {below[row].item()} for record {prompts[row].id!r}:"
            " denominators are at least 0, and what cannot be scored is NaN in both"
        )
    return above, below


def _as_tensor(name: str, returned: Any, prompts: Sequence[PromptRecord]) -> Tensor:
    """Keeps the dtype of a tensor; Python numbers become float64."""
    if isinstance(returned, Tensor):
        if returned.is_complex():
            raise UserError(f"reward {name!r} gave complex numbers ({returned.dtype}); expected real ones")
        return returned.detach().cpu()
    expected = f"reward {name!r} must return a sequence of numbers, a tensor or a RewardOutput, got"
    if isinstance(returned, Mapping):  # Its keys would be taken for the scores.
        raise UserError(f"{expected} {type(returned).__name__}")
    try:
        scores = list(returned)
    except TypeError as error:
        raise UserError(f"{expected} {returned!r}") from error
    numbers = [_number(name, score, row, prompts) for row, score in enumerate(scores)]
    return torch.tensor(numbers, dtype=torch.float64)


def _number(name: str, score: Any, row: int, prompts: Sequence[PromptRecord]) -> float:
    if score is None:
        return float("nan")
    try:
        if isinstance(score, str | bytes):
            raise TypeError("text hides a reward that forgot to parse")
        score = score.item() if isinstance(score, Tensor) else score
        if isinstance(score, Complex) and not isinstance(score, Real):  # NumPy only warns.
            raise TypeError("a complex number has no order")
        return float(score)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise UserError(
            f"reward {name!r} gave {score!r} {_where(row, prompts)}; expected a real number or None"
        ) from error


def _where(row: int, prompts: Sequence[PromptRecord]) -> str:
    return f"for record {prompts[row].id!r}" if row < len(prompts) else f"at position {row}"


def some_ids(prompts: Sequence[PromptRecord], limit: int = 3) -> str:
    ids = list(dict.fromkeys(record.id for record in prompts))  # A prompt has several samples.
    return ", ".join(map(repr, ids[:limit])) + (f" and {len(ids) - limit} more" if len(ids) > limit else "")


log = logging.getLogger(__name__)

Score = Callable[[Sequence[PromptRecord], Sequence[Sample]], RewardOutput]


class RewardCodeError(UserError):
    """The reward's own code raised an error."""


@dataclass
class FailureBudget:
    """Limits the samples that a reward's code may fail on; before any sample was scored, every error raises."""

    share: float = 0.0
    """Largest share of failed samples in the run so far; one unit may fail regardless unless the share is 0."""
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
        """Calls ``score(prompts, samples)``; if that fails, scores each of ``units`` alone: rows of samples or groups.

        Raises RewardCodeError if too many failed.
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
            unit_prompts = [prompts[row] for row in rows]
            try:
                output = score(unit_prompts, [samples[row] for row in rows])
            except RewardCodeError as error:
                nothing = torch.full((len(rows),), torch.nan)
                output = RewardOutput(values=nothing, failed=dict.fromkeys(range(len(rows)), str(error)))
            self._count(name, output, unit_prompts, len(rows))
            outputs.append(output)
        return put_together(outputs, torch.cat, torch.cat)

    def _count(self, name: str, output: RewardOutput, prompts: Sequence[PromptRecord], at_once: int) -> None:
        """Raises RewardCodeError if the failed samples exceed both the share and ``at_once``."""
        self.scored += len(prompts) - len(output.failed)
        if not output.failed:
            return
        reason = list(output.failed.values())[-1]
        if not self.share or not self.scored:
            raise RewardCodeError(f"reward {name!r} failed on {len(output.failed)} of {len(prompts)} samples: {reason}")
        self.failed += len(output.failed)
        total = self.scored + self.failed
        if self.failed > max(float(at_once), self.share * total):
            raise RewardCodeError(
                f"reward {name!r} failed on {self.failed} of {total} samples, more than the share {self.share:g} that"
                f" rewards.{name}.max_failed_share allows. The last error: {reason}"
            )
        ids = some_ids([prompts[row] for row in output.failed], 5)
        log.warning("reward %r failed on %s, left unscored: %s", name, ids, reason.splitlines()[-1])


def spread(output: RewardOutput, rows: Sequence[int], count: int) -> RewardOutput:
    """Returns the output of some ``rows`` as one of ``count`` rows, in which the other rows are unscored."""

    def among(values: Tensor) -> Tensor:
        whole = torch.full((count,), torch.nan)
        whole[list(rows)] = values
        return whole

    return RewardOutput(
        values=among(output.values),
        parts={name: among(values) for name, values in output.parts.items()},
        ratios={name: (among(above), among(below)) for name, (above, below) in output.ratios.items()},
    )


def put_together(
    outputs: Sequence[RewardOutput], values: Callable[[list[Tensor]], Tensor], sums: Callable[[list[Tensor]], Tensor]
) -> RewardOutput:
    """Joins outputs by ``values``, and either side of their ratios by ``sums``; what one of them lacks is NaN there."""

    def part(name: str) -> Tensor:
        return values([output.parts.get(name, torch.full_like(output.values, torch.nan)) for output in outputs])

    def side(name: str, number: int) -> Tensor:
        pairs = [output.ratios.get(name, (torch.full_like(output.values, torch.nan),) * 2) for output in outputs]
        return sums([pair[number] for pair in pairs])

    parts = dict.fromkeys(name for output in outputs for name in output.parts)
    ratios = dict.fromkeys(name for output in outputs for name in output.ratios)
    return RewardOutput(
        values=values([output.values for output in outputs]),
        parts={name: part(name) for name in parts},
        ratios={name: (side(name, 0), side(name, 1)) for name in ratios},
    )
