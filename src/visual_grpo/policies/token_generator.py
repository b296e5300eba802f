"""A model of one token module as training and evaluation see it: a language model with one LoRA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import torch

from visual_grpo.config import SamplerConfig
from visual_grpo.errors import UserError
from visual_grpo.policies.adapters import AdapterSet
from visual_grpo.policies.family import ModelSettings, Module
from visual_grpo.policies.token_model import Encoded, TokenModel
from visual_grpo.policies.token_policy import TokenPolicy, sample_merged
from visual_grpo.types import JointPolicy, Policy, PromptRecord, Sample

E = TypeVar("E", bound=Encoded)


class TokenGenerator(Generic[E]):
    """Satisfies ``family.Model`` for any `TokenModel`."""

    def __init__(self, model: TokenModel[E], modules: Mapping[str, Module], settings: ModelSettings) -> None:
        """``modules``: the family's, of which there is one."""
        (name,) = modules
        self.model, self.config, self._name = model, settings.policy, name
        self.adapters = AdapterSet(modules, {name: model.network})

    @torch.no_grad()
    def generate(self, records: Sequence[PromptRecord], seeds: Sequence[int], sampler: SamplerConfig) -> list[Sample]:
        """One sample per record; each depends on its record, its seed and the weights."""
        sampled = sample_merged(self.model, records, seeds, sampler, self.config)
        return list(self.model.samples(records, sampled.trajectory, seeds))

    def policy(
        self, module: str, *, rollout: SamplerConfig, stock: SamplerConfig, kl_reference: bool = False
    ) -> TokenPolicy[E]:
        """Answers to each prompt; ``stock`` decides nothing here."""
        return TokenPolicy(self.model, self.adapters[module], rollout, self.config, kl_reference=kl_reference)

    def joint_policy(self, outer: Policy, inner: Policy) -> JointPolicy:
        raise UserError(f"This model has one module ({self._name}): policy.stages=joint is for models of two stages.")
