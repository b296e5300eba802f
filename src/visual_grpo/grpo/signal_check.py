"""Before training: do the policy gradients of independent rollouts point the same way?

Where a reward cannot see what a policy varies, each rollout's gradient is noise: the cosine between two of them is
about 0, training is a random walk, and no learning rate mends that. Where there is something to learn it is well above.

The cosine is taken of the gradients as AdamW scales them. Without that a few elements decide it: of the gradient of the
small token generator on edits, half the energy can be in 5 of 55,296 elements, whose sign is that of chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

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
"""Rollouts before the first look; then twice as many, and so on."""
_ADAM_EPSILON = 1e-8
"""AdamW's: it hardly moves an element whose gradient is smaller."""

_ADVICE = {
    "ar": (
        "a reward that sees what the tokens decide; a higher sampling.rollout.temperature; more grpo.prompts_per_step"
    ),
    "dit": (
        "a reward that sees what the denoising steps decide (detail, colour, text); policy.flow.noise between .4 and 1;"
        " an earlier window (policy.flow.window_start=0); policy.share_start_noise=true; more prompts rather than more"
        " decodes (grpo.dit.prompts_per_step, grpo.dit.group_size)"
    ),
}


class NoSignalError(UserError):
    """A module's policy gradients are noise."""


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

    def below(self, least: float) -> bool:
        """Whether the cosine is less than ``least`` beyond two standard errors."""
        return self.cosine + 2 * self.error < least

    def above(self, least: float) -> bool:
        """Whether the cosine is more than ``least`` beyond one standard error.

        One, since a run that passes by chance costs no more than without the check, and every further rollout costs.
        """
        return self.cosine - self.error > least

    def __str__(self) -> str:
        return f"{self.cosine:.3f} +- {self.error:.3f} in {self.rollouts} rollouts"


def measure_signal(
    trainer: GRPOTrainer[Any],
    prompts: Sequence[PromptRecord],
    *,
    most: int,
    least: float,
    unclear: Callable[[Signal], None] = lambda signal: None,
) -> Signal:
    """The cosine between the gradients of independent rollouts; 0 where a gradient vanishes.

    Draws rollouts, ``most`` of them at most, until `Signal.above`. That the cosine is below ``least`` is not believed
    sooner, since a few rollouts can disagree by chance. ``unclear`` gets what was measured before more are drawn.
    Changes neither the policy nor what the training will draw.
    """
    config = trainer.config
    independent, gradients = _gradients(trainer, prompts), list[Tensor]()
    for looked in _looks(most):
        gradients += islice(independent, looked - len(gradients))
        cosine, error = mean_of_pairs(update_cosines(torch.stack(gradients)))
        samples = config.prompts_per_step * config.group_size
        signal = Signal(cosine=cosine, error=error, rollouts=len(gradients), samples=samples)
        if signal.above(least) or not any(gradient.any() for gradient in gradients):
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


def least_cosine(check: SignalCheckConfig, steps: int) -> float:
    """``check``'s own, or the cosine c below which even the sum of all ``steps``' updates is more noise than signal.

    Of the squared norm of n updates' sum the part they have in common is n c / (1 + (n - 1) c), a half at
    c = 1 / (n + 1). So a long run learns from less: .008 was enough for the 360 steps of the negative points.
    """
    return 1 / (steps + 1) if check.least_cosine is None else check.least_cosine


def describe(signals: Mapping[str, Signal], least: float) -> str:
    """One line: each module's cosine, and where the rollouts cannot tell whether there is something to learn."""
    shown = ", ".join(f"{module} {signal}" for module, signal in signals.items())
    unclear = [module for module, s in signals.items() if not s.below(least) and not s.above(least)]
    if unclear:
        shown += f" (too few to tell for {', '.join(unclear)}: raise policy.signal_check.rollouts)"
    return shown


def check_signal(signals: Mapping[str, Signal], least: float) -> None:
    """Raises NoSignalError for the first module whose cosine is below ``least`` beyond two standard errors."""
    for module, signal in signals.items():
        if signal.below(least):
            raise NoSignalError(
                f"The signal check stopped the run before its first step: nothing to learn for the module {module!r}.\n"
                f"  expected: a mean cosine of at least {least:.2g} between the gradients of independent rollouts\n"
                f"  measured: {signal} of {signal.samples} samples\n"
                "Near 0 the reward cannot see what this module varies, and training would be a random walk.\n"
                f"What to change: {_ADVICE.get(module, 'the reward, or what the policy varies')}.\n"
                "To train all the same: --params=policy.signal_check.rollouts=0"
            )
