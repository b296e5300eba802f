"""Before training: do the policy gradients of independent rollouts point the same way?

Where a reward cannot see what a policy varies, each rollout's gradient is noise: the cosine between two of them is
about 0 and training is a random walk at any learning rate. Where there is something to learn it is well above.

The rule (`SignalRule`). A run is stopped only where all the rollouts that it may draw cannot tell its cosine from 0,
although they were enough to tell a useful cosine from 0. Any other run starts: a cosine above 0 by two standard
errors however small it is, and a cosine that too few rollouts leave unknown, which is said.

The cosine is taken of the gradients as AdamW scales them. Without that a few elements decide it: of the gradient of the
small token generator on edits, half the energy can be in 5 of 55,296 elements, whose sign is that of chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from visual_grpo.config import SignalCheckConfig
from visual_grpo.errors import UserError
from visual_grpo.grpo.order import PromptOrder
from visual_grpo.grpo.trainer import GRPOTrainer
from visual_grpo.types import PromptRecord

_SEED_OFFSET = 7_919
"""The check's rollouts are other ones than the training's."""
_FIRST_LOOK = 6
"""Rollouts before the first look; then twice as many, and so on. Fewer stop no run: their standard error is itself so
uncertain that a planted cosine of .1 would be refused in up to 4% of runs with 3 or 4 rollouts (300 draws each)."""
_GREATEST_USEFUL_COSINE = 0.05
"""A run of few steps learns little from any cosine, which says nothing of whether there is something to learn."""
_NEAR_ZERO = "Near 0 the reward cannot see what this module varies, and training would be a random walk."
_VANISHED = "Every gradient was exactly 0: all samples of a prompt got the same reward, so none is better than another."
_ADAM_EPSILON = 1e-8
"""AdamW's: it hardly moves an element whose gradient is smaller."""


@dataclass(frozen=True, kw_only=True)
class Signal:
    """How far the gradients of independent rollouts agree."""

    cosine: float
    """Mean over all pairs of rollouts."""
    error: float
    """Its standard error (jackknife over the rollouts)."""
    rollouts: int
    samples: int
    """Images of one rollout."""

    @property
    def low(self) -> float:
        """Lower end of the interval of two standard errors."""
        return self.cosine - 2 * self.error

    @property
    def high(self) -> float:
        return self.cosine + 2 * self.error

    def __str__(self) -> str:
        return f"{self.cosine:z.3f} +- {self.error:.3f} in {self.rollouts} rollouts"


class NoSignalError(UserError):
    """A module's policy gradients are noise."""

    def __init__(self, message: str, *, module: str, signal: Signal) -> None:
        super().__init__(message)
        self.module, self.signal = module, signal


Verdict = Literal["passed", "refused", "unclear"]


@dataclass(frozen=True, kw_only=True)
class SignalRule:
    """When a measured signal lets a run start."""

    useful: float
    """A cosine that the run could learn from: rollouts that would not have seen it cannot stop the run."""
    least: float | None = None
    """The user's own bound: the run is stopped where the interval of two standard errors is below it."""

    @classmethod
    def of(cls, check: SignalCheckConfig, steps: int) -> SignalRule:
        """Useful is 1 / (``steps`` + 1), where the sum of all steps' updates is half signal and half noise.

        Of the squared norm of n updates' sum the part they have in common is n c / (1 + (n - 1) c), a half at
        c = 1 / (n + 1). So a long run learns from less: .008 was enough for the 360 steps of the negative points.
        """
        return cls(useful=min(1 / (steps + 1), _GREATEST_USEFUL_COSINE), least=check.least_cosine)

    def verdict(self, signal: Signal) -> Verdict:
        """On a signal of all the rollouts that may be drawn; ``passed`` needs no more of them."""
        if signal.low > (self.least or 0.0):
            return "passed"
        if self.least is not None:
            return "refused" if signal.high < self.least else "unclear"
        enough = signal.rollouts >= _FIRST_LOOK and 2 * signal.error < self.useful
        return "refused" if enough else "unclear"


def measure_signal(
    trainer: GRPOTrainer[Any],
    prompts: Sequence[PromptRecord],
    *,
    most: int,
    rule: SignalRule,
    drawn: Callable[[int], None] = lambda rollouts: None,
    unclear: Callable[[Signal], None] = lambda signal: None,
) -> Signal:
    """The cosine between the gradients of independent rollouts; 0 where a gradient vanishes.

    Draws rollouts until one look lets the run pass, ``most`` of them at most: that it does not pass is not believed
    sooner, since a few rollouts can disagree by chance. Changes neither the policy nor what the training will draw.

    Args:
        drawn: called after every rollout with how many there are, since one can take a minute.
        unclear: gets what was measured before more are drawn.
    """
    config = trainer.config
    independent, gradients = _gradients(trainer, prompts), list[Tensor]()
    for looked in _looks(most):
        for gradient in islice(independent, looked - len(gradients)):
            gradients.append(gradient)
            drawn(len(gradients))
        cosine, error = mean_of_pairs(update_cosines(torch.stack(gradients)))
        samples = config.prompts_per_step * config.group_size
        signal = Signal(cosine=cosine, error=error, rollouts=len(gradients), samples=samples)
        if rule.verdict(signal) == "passed" or not any(gradient.any() for gradient in gradients):
            break
        if looked < most:
            unclear(signal)
    return signal


def _gradients(trainer: GRPOTrainer[Any], prompts: Sequence[PromptRecord]) -> Iterator[Tensor]:
    """[N] of one independent rollout after the other, without end."""
    generator = torch.Generator().manual_seed(trainer.seed + _SEED_OFFSET)
    order = PromptOrder.over(prompts, trainer.seed + _SEED_OFFSET)
    while True:
        chosen = [prompts[i] for i in order.draw(trainer.config.prompts_per_step)]
        yield trainer.policy_gradient(chosen, generator)


def _looks(most: int) -> Iterator[int]:
    """Numbers of rollouts after which to look: doubling, the last is ``most``."""
    looked = _FIRST_LOOK
    while looked < most:
        yield looked
        looked *= 2
    yield most


def update_cosines(gradients: Tensor) -> Tensor:
    """[K, K] cosines between K gradients, [K, N], with every element in units of its root mean square over the K.

    So AdamW scales its updates (arXiv 1412.6980, algorithm 1). The expected cosine of noise stays 0: where an element
    is as likely as its negative, so is the scaled one. The cosine with a gradient that vanishes is 0.
    """
    scaled = gradients / (gradients.square().mean(0).sqrt() + _ADAM_EPSILON)
    directions = scaled / scaled.norm(dim=1, keepdim=True).clamp(min=1e-30)
    return directions @ directions.t()


def mean_of_pairs(cosines: Tensor) -> tuple[float, float]:
    """Mean of the off-diagonal of a symmetric [K, K], K > 2, and its jackknife standard error."""
    count = len(cosines)
    off_diagonal = cosines - cosines.diag().diag()
    total = off_diagonal.sum()
    mean = float(total) / (count * (count - 1))
    without = (total - 2 * off_diagonal.sum(1)) / ((count - 1) * (count - 2))
    return mean, float((without - without.mean()).square().sum() * (count - 1) / count) ** 0.5


def describe(signals: Mapping[str, Signal], rule: SignalRule) -> str:
    """One line: each module's cosine, and where the rollouts cannot tell whether there is something to learn."""
    shown = ", ".join(f"{module} {signal}" for module, signal in signals.items())
    unclear = [module for module, signal in signals.items() if rule.verdict(signal) == "unclear"]
    if unclear:
        shown += f" (too few to tell for {', '.join(unclear)}: raise policy.signal_check.rollouts)"
    return shown


def check_signal(signals: Mapping[str, Signal], rule: SignalRule, advice: Mapping[str, str]) -> None:
    """Raises NoSignalError for the first module that is refused.

    Args:
        advice: module -> what gives this module's gradients something in common.
    """
    for module, signal in signals.items():
        if rule.verdict(signal) == "refused":
            bound = "above 0 by two standard errors" if rule.least is None else f"at least {rule.least:.2g}"
            raise NoSignalError(
                f"The signal check stopped the run before its first step: nothing to learn for the module {module!r}.\n"
                f"  expected: a mean cosine {bound} between the gradients of independent rollouts\n"
                f"  measured: {signal} of {signal.samples} samples\n"
                f"{_VANISHED if signal.cosine == signal.error == 0 else _NEAR_ZERO}\n"
                f"What to change: {advice.get(module, 'the reward, or what the policy varies')}.\n"
                "To train all the same: --params=policy.signal_check.rollouts=0",
                module=module,
                signal=signal,
            )
