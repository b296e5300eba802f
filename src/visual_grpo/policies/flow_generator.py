"""A model of one flow module as training and evaluation see it: text encoders and VAE frozen, one LoRA."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch

from visual_grpo.config import SamplerConfig
from visual_grpo.errors import UserError
from visual_grpo.policies.adapters import AdapterSet
from visual_grpo.policies.denoising import Denoiser
from visual_grpo.policies.family import ModelSettings, Module
from visual_grpo.policies.flow_model import FlowModel
from visual_grpo.policies.flow_policy import FlowPolicy
from visual_grpo.policies.rows import rows_by_source_count
from visual_grpo.types import JointPolicy, Policy, PromptRecord, Sample

C = TypeVar("C")


class FlowGenerator(Generic[C]):
    """Satisfies ``family.Model`` for any `FlowModel`."""

    def __init__(self, model: FlowModel[C], modules: Mapping[str, Module], settings: ModelSettings) -> None:
        """``modules``: the family's, of which there is one."""
        (name,) = modules
        self.model, self.config, self._name = model, settings.policy, name
        self.adapters = AdapterSet(modules, {name: model.transformer})
        config = settings.policy
        self._denoiser = Denoiser(
            model, config.flow, denoise_batch=config.denoise_batch, decode_batch=config.decode_batch
        )

    @classmethod
    def builder(
        cls, model_class: Callable[[Any, tuple[int, int], Any], FlowModel[C]], modules: Mapping[str, Module]
    ) -> Callable[[Any, ModelSettings], FlowGenerator[C]]:
        """``Family.build`` for a model that is made of (pipeline, size, the family's options)."""
        return lambda pipeline, settings: cls(model_class(pipeline, settings.size, settings.options), modules, settings)

    @torch.no_grad()
    def generate(self, records: Sequence[PromptRecord], seeds: Sequence[int], sampler: SamplerConfig) -> list[Sample]:
        """One uint8 image [3, H, W] per record; each depends on its record, its seed and the weights."""
        images: dict[int, Sample] = {}
        for rows in rows_by_source_count(records):
            own_seeds = [seeds[row] for row in rows]
            _, guidance_scale = sampler.denoising()
            conditions = self.model.conditions([records[row] for row in rows], own_seeds, guidance_scale)
            images |= dict(zip(rows, self._denoiser.generate(conditions, own_seeds, sampler), strict=True))
        return [images[row] for row in range(len(records))]

    def policy(
        self, module: str, *, rollout: SamplerConfig, stock: SamplerConfig, kl_reference: bool = False
    ) -> FlowPolicy[C]:
        """Decodes of each prompt; ``stock`` decides nothing here."""
        return FlowPolicy(self.model, self.adapters[module], rollout, self.config, kl_reference=kl_reference)

    def joint_policy(self, outer: Policy, inner: Policy) -> JointPolicy:
        raise UserError(f"This model has one module ({self._name}): policy.stages=joint is for models of two stages.")
