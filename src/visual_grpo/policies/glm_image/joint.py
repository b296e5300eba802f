"""One rollout for both stages of GLM-Image: the DiT decodes the very tokens that the AR module is trained on."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from visual_grpo.policies.flow_policy import FlowPolicy
from visual_grpo.policies.glm_image.decoder import Conditions, GlmImageDecoder
from visual_grpo.policies.glm_image.token_model import EncodedPrompts, GlmImageTokens
from visual_grpo.policies.token_policy import TokenPolicy
from visual_grpo.types import JointRollout, PromptRecord


class GlmImageJointPolicy:
    """Satisfies ``types.JointPolicy``."""

    def __init__(self, ar: TokenPolicy[EncodedPrompts], dit: FlowPolicy[Conditions]) -> None:
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
        groups = self.ar.sample(prompts, outer_size, generator)
        seconds = time.perf_counter() - started
        tokens, decoder = self.ar.model, self.dit.model
        assert isinstance(tokens, GlmImageTokens)
        assert isinstance(decoder, GlmImageDecoder)
        grids = tokens.image_tokens(groups.sampled.trajectory.tokens, groups.records)
        conditions = decoder.conditions_of(groups.records, grids, self.dit.guidance_scale)
        inner = self.dit.decode(groups.records, conditions, groups.decode_seeds, inner_size, generator)
        outer = self.ar.as_rollout(groups, inner.samples[::inner_size], {"seconds/tokens": seconds})
        return JointRollout(outer=outer, inner=inner)
