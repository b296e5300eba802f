"""Before training: do the policy gradients of independent rollouts point the same way?

Where a reward cannot see what a policy varies, each rollout's gradient is noise: the cosine between two of them is
about 0, training is a random walk, and no learning rate mends that. Where there is something to learn it is well above.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from visual_grpo.errors import UserError
from visual_grpo.grpo.order import PromptOrder
from visual_grpo.grpo.trainer import GRPOTrainer
from visual_grpo.types import PromptRecord

_SEED_OFFSET = 7_919
"""The check's rollouts are other ones than the training's."""

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


def gradient_cosine(trainer: GRPOTrainer[Any], prompts: Sequence[PromptRecord], rollouts: int) -> float:
    """Mean cosine between the gradients of ``rollouts`` independent rollouts; 0 where a gradient vanishes.

    Changes neither the policy nor what the training will draw.
    """
    generator = torch.Generator().manual_seed(trainer.seed + _SEED_OFFSET)
    order = PromptOrder([len(prompt.source_images) for prompt in prompts], trainer.seed + _SEED_OFFSET)
    gradients = []
    for _ in range(rollouts):
        chosen = [prompts[i] for i in order.draw(trainer.config.prompts_per_step)]
        gradient = trainer.policy_gradient(chosen, generator)
        gradients.append(gradient / gradient.norm().clamp(min=1e-30))
    stacked = torch.stack(gradients)
    cosines = stacked @ stacked.t()
    return float((cosines.sum() - cosines.trace()) / (rollouts * (rollouts - 1)))


def check_signal(cosines: Mapping[str, float], least: float, samples: Mapping[str, int]) -> None:
    """Raises NoSignalError for the first module whose cosine is below ``least``.

    ``samples``: how many images each of its rollouts had, for the message.
    """
    for module, cosine in cosines.items():
        if cosine < least:
            raise NoSignalError(
                f"The signal check stopped the run before its first step: nothing to learn for the module {module!r}.\n"
                f"  expected: a mean cosine of at least {least:g} between the gradients of independent rollouts\n"
                f"  measured: {cosine:.3f} ({samples[module]} images a rollout)\n"
                "Near 0 the reward cannot see what this module varies, and training would be a random walk.\n"
                f"What to change: {_ADVICE.get(module, 'the reward, or what the policy varies')}.\n"
                "To train all the same: --params=policy.signal_check.rollouts=0"
            )
