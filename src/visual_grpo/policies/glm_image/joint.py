"""One rollout for both modules of GLM-Image: the DiT goes on from the very tokens that the AR module is trained on."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from visual_grpo.policies.glm_image.ar import GlmImageArPolicy
from visual_grpo.policies.glm_image.dit import GlmImageDitPolicy
from visual_grpo.types import JointRollout, PromptRecord


class GlmImageJointPolicy:
    """Satisfies ``types.JointPolicy``."""

    def __init__(self, ar: GlmImageArPolicy, dit: GlmImageDitPolicy) -> None:
        """Two policies on one ``GlmImage``."""
        self.ar, self.dit = ar, dit

    @torch.no_grad()
    def joint_rollout(
        self, prompts: Sequence[PromptRecord], outer_size: int, inner_size: int, generator: torch.Generator
    ) -> JointRollout:
        """A token samples of each prompt, D stochastic decodes of each; with A or D = 1 the single module's rollout."""
        if inner_size == 1:
            return JointRollout(outer=self.ar.rollout(prompts, outer_size, generator), inner=None)
        if outer_size == 1:
            return JointRollout(outer=None, inner=self.dit.rollout(prompts, inner_size, generator))
        started = time.perf_counter()
        rows, noise_seeds, sampled = self.ar.sample(prompts, outer_size, generator)
        seconds = time.perf_counter() - started
        inner = self.dit.decode(rows, sampled.trajectory.tokens, noise_seeds, inner_size, generator)
        outer = self.ar.as_rollout(rows, inner.samples[::inner_size], sampled, {"seconds/tokens": seconds})
        return JointRollout(outer=outer, inner=inner)
