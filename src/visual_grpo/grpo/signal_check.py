"""Signal check: before the first step, there is something to learn.

Where a reward cannot see what a policy varies, each rollout's gradient is noise: the cosine between
two of them is about 0 and training is a random walk at any learning rate. A run is stopped where every gradient is
exactly 0, else only after the last allowed rollout, if the cosine is not significantly above 0 and its standard error
is small enough to have shown a useful cosine (`Signal.verdict`). The gradients are scaled as AdamW scales them: else a
few elements would decide the cosine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord
from visual_grpo.grpo.distributed import ranks
from visual_grpo.grpo.metrics import Clock
from visual_grpo.grpo.optimizer import MOST_OVERFLOWS, non_finite
from visual_grpo.grpo.policy_loss import PolicyLoss
from visual_grpo.grpo.sampling import PromptOrder, sample_and_score
from visual_grpo.grpo.trainer import GRPOTrainer

_SEED_OFFSET = 7_919
"""Makes the check's rollouts differ from the training's."""
_FIRST_LOOK = 6
"""Rollouts before the first test, doubled before each further one. Fewer stop no run by their cosine: its standard
error is so uncertain that with 3 or 4 rollouts up to 4% of runs with a planted cosine of .1 would be refused (300 draws
each)."""
_GREATEST_USEFUL_COSINE = 0.05
"""Upper limit of `useful_cosine`: a short run learns little from any cosine."""
_ADAM_EPSILON = 1e-8
"""AdamW's: it hardly moves an element whose gradient is smaller."""


def useful_cosine(steps: int) -> float:
    """Returns the cosine at which the sum of ``steps`` updates is half signal, half noise.

    Of the squared norm of n updates' sum the part they have in common is n c / (1 + (n - 1) c), a half at
    c = 1 / (n + 1). So a long run learns from less: .008 was enough for the 360 steps of the negative points.
    """
    return min(1 / (steps + 1), _GREATEST_USEFUL_COSINE)


@dataclass(frozen=True, kw_only=True)
class Signal:
    """Agreement of the gradients of independent rollouts."""

    cosine: float
    """Mean over all pairs of rollouts."""
    error: float
    """Its standard error (jackknife over the rollouts)."""
    rollouts: int
    samples: int
    """Images of one rollout."""
    vanished: bool = False
    """Every gradient was exactly 0, which is not a matter of chance."""

    def __str__(self) -> str:
        return f"{self.cosine:z.3f} +- {self.error:.3f} in {self.rollouts} rollouts"

    def verdict(self, useful: float) -> Literal["passed", "refused", "unclear"]:
        """Returns whether the cosine is above 0; final if ``passed`` or all vanished, else only after the last rollout.

        ``useful``: the run is refused only if its rollouts would have shown such a cosine.
        """
        if self.vanished:
            return "refused"
        if self.cosine - 2 * self.error > 0:
            return "passed"
        enough = self.rollouts >= _FIRST_LOOK and 2 * self.error < useful
        return "refused" if enough else "unclear"


class NoSignalError(UserError):
    """A module's policy gradients are noise."""


def measure_signal(
    trainer: GRPOTrainer[Any],
    prompts: Sequence[PromptRecord],
    *,
    most: int,
    useful: float,
    note: Callable[[str], None] = lambda text: None,
    advance: Callable[[int, int], None] = lambda done, needed: None,
) -> Signal:
    """Measures the cosine between the gradients of independent rollouts; 0 where a gradient vanishes.

    Generates until a test passes, at most ``most`` rollouts: only the last test can fail, since a few rollouts can
    disagree by chance. Changes neither the policy nor the samples of the training.

    Args:
        note: receives a line when more rollouts are needed.
        advance: receives, after each rollout, their number and the number needed for the next test.
    """
    config, gradients = trainer.config, list[Tensor]()
    generator = torch.Generator().manual_seed(trainer.seed + _SEED_OFFSET)
    order = PromptOrder(prompts, trainer.seed + _SEED_OFFSET)
    look = min(_FIRST_LOOK, most)
    while True:
        while len(gradients) < look:
            chosen = [prompts[i] for i in order.take(config.prompts_per_step)]
            gradients.append(probe_gradient(trainer, chosen, generator))
            advance(len(gradients), look)
        cosine, error = mean_of_pairs(update_cosines(torch.stack(gradients)))
        signal = Signal(
            cosine=cosine,
            error=error,
            rollouts=look,
            samples=config.prompts_per_step * config.group_size,
            vanished=not any(gradient.any() for gradient in gradients),
        )
        if look == most or signal.vanished or signal.verdict(useful) == "passed":
            return signal
        note(f"Signal check: {trainer.module} {signal} cannot tell yet; generating more samples")
        look = min(2 * look, most)


def probe_gradient(trainer: GRPOTrainer[Any], prompts: Sequence[PromptRecord], generator: torch.Generator) -> Tensor:
    """Returns the flat gradient of the loss on one rollout of ``prompts``, float32 on the CPU; changes nothing.

    Float16's scale is halved until it can hold the gradient, and is restored afterwards.
    """
    config, optimizer, scaler = trainer.config, trainer.optimizer, trainer.optimizer.scaler
    clock = Clock(device=str(trainer.device))
    batches = trainer.build_batches(sample_and_score(trainer.policy, trainer.scorer, prompts, config, generator, clock))
    policy_loss, scale = PolicyLoss(config, batches, reward_only=True), scaler.state_dict()
    for _ in range(MOST_OVERFLOWS):
        with optimizer.gradient_sums(), ranks.gathering(None):
            for batch, rows, decisions in trainer.replay(batches, on_policy=True):
                loss, *_ = policy_loss(decisions, batch, rows)
                if not math.isfinite(value := float(loss.detach())):
                    raise non_finite(value, "loss", trainer.step + 1, batch.prompt_ids(rows))
                optimizer.backward(loss)
        if not scaler.is_enabled():
            break
        scaler.unscale_(optimizer.adamw)
        scaler.update()
        if all(p.grad.isfinite().all() for p in trainer.parameters if p.grad is not None):
            break
    scaler.load_state_dict(scale)
    flat = torch.cat([p.grad.flatten().float().cpu() for p in trainer.parameters if p.grad is not None])
    optimizer.zero_grad()
    return flat


def update_cosines(gradients: Tensor) -> Tensor:
    """[K, K] cosines between K gradients, [K, N], with every element in units of its root mean square over the K.

    So AdamW scales its updates (arXiv 1412.6980, algorithm 1). The expected cosine of noise stays 0: where an element
    is as likely as its negative, the scaled one is too. The cosine with a gradient that vanishes is 0.
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


def check_signal(signals: Mapping[str, Signal], useful: float, advice: Mapping[str, str]) -> str:
    """Returns one line: each module's cosine, and the modules for which the rollouts cannot tell.

    Raises NoSignalError for the first module that is refused; ``advice`` says what to change for each module.
    """
    for module, signal in signals.items():
        if signal.verdict(useful) != "refused":
            continue
        why = "Near 0 the reward cannot see what this module varies, and training would be a random walk."
        if signal.vanished:
            why = "Every gradient was exactly 0: all samples of a prompt got the same reward, so none is better."
        raise NoSignalError(
            f"The signal check stopped the run before its first step: nothing to learn for the module {module!r}.\n"
            "  expected: a mean cosine above 0 by two standard errors between the gradients of independent rollouts\n"
            f"  measured: {signal} of {signal.samples} samples\n"
            f"{why}\n"
            f"What to change: {advice.get(module, 'the reward, or what the policy varies')}.\n"
            "To train all the same: --params=policy.signal_check.rollouts=0"
        )
    shown = ", ".join(f"{module} {signal}" for module, signal in signals.items())
    unclear = [module for module, signal in signals.items() if signal.verdict(useful) == "unclear"]
    if unclear:
        shown += f" (too few to tell for {', '.join(unclear)}: raise policy.signal_check.rollouts)"
    return shown
