"""A loaded model as training and evaluation see it: its adapters, its samples and the policies of its modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visual_grpo.common import console
from visual_grpo.common.errors import UserError
from visual_grpo.common.types import PromptRecord, Sample, checked_record
from visual_grpo.config import LoraParams, SamplerConfig
from visual_grpo.grpo.checkpoint import tensors_under
from visual_grpo.grpo.distributed import ranks
from visual_grpo.models.flow.denoising import Denoiser
from visual_grpo.models.flow.flow_policy import FlowPolicy
from visual_grpo.models.lora import Adapter, AdapterPolicy
from visual_grpo.models.module import ModelSettings, Module
from visual_grpo.models.offload import on_device
from visual_grpo.models.rows import rows_by_source_count
from visual_grpo.models.tokens.token_policy import TokenPolicy, sample_with_adapter

DISTILLED = (
    "Warning: this model is distilled to a few steps, which jump to the image instead of following a flow. It was not"
    " distilled for the noise of stochastic steps, nor for the losses nft and awm: expect blurred or noisy"
    " pictures, and a reward that falls or collapses. Train the undistilled model, whose adapter also loads into this"
    " one; or else set policy.flow.window_steps=1, a low policy.flow.noise and grpo.learning_rate, and look at the"
    " pictures."
)
"""Printed before a training of a `FlowModel` that has a true attribute ``distilled``."""


class AdapterSet:
    """The adapters of one model by the names of its modules; empty at first."""

    def __init__(self, modules: Mapping[str, Module], networks: Mapping[str, Any]) -> None:
        """``networks``: the model of transformers or diffusers that each module's LoRA is put on."""
        self._modules, self.networks = modules, networks
        self._adapters: dict[str, Adapter] = {}

    def attach(self, params: Mapping[str, LoraParams], seed: int) -> None:
        """A fresh adapter for each module named; changes nothing until it is trained."""
        for name, lora in params.items():
            module = self._modules[name]
            with on_device(self.networks[name]):  # The LoRA is put where the weights are, and stays there.
                self._adapters[name] = module.adapter.attach(self.networks[name], lora, module.targets, seed)

    def load(self, folder: Path, names: Sequence[str] = ()) -> None:
        """Saved adapters, for sampling only; no ``names``: all that are there.

        ``folder`` has one folder a module, as `save` writes them, or the files of one module, as
        `AdapterPolicy.save_adapter` does.
        """
        files = {name: module.adapter.file for name, module in self._modules.items()}
        places = {name: folder if (folder / file).is_file() else folder / name for name, file in files.items()}
        names = names or [name for name, place in places.items() if (place / files[name]).is_file()]
        if not names:
            raise UserError(f"{folder} holds no adapter of the modules {', '.join(self._modules)}.")
        for name in names:
            with on_device(self.networks[name]):
                self._adapters[name] = self._modules[name].adapter.load(self.networks[name], places[name])

    def start_from(self, folder: Path) -> None:
        """Gives the attached adapters the weights of saved ones of the same LoRA, to be trained on."""
        for name, adapter in self._adapters.items():
            adapter.restore(folder / name)

    def save(self, folder: Path) -> None:
        """Writes a folder for each module, in its library's format."""
        for name, adapter in self._adapters.items():
            adapter.save(folder / name)

    def state(self) -> dict[str, Tensor]:
        """Every adapter's tensors, as ``module/name``; copies, which training does not change."""
        return {
            f"{m}/{name}": value for m, adapter in self._adapters.items() for name, value in adapter.state().items()
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for name, adapter in self._adapters.items():
            adapter.load_state(tensors_under(name, state))

    def __getitem__(self, name: str) -> Adapter:
        if name not in self._adapters:
            raise UserError(f"the module {name!r} has no adapter yet: call adapters.attach or adapters.load first")
        return self._adapters[name]


class Model:
    """A `FlowModel` or `TokenModel` with a LoRA, all else frozen; a family of several modules extends this class."""

    def __init__(self, model: Any, modules: Mapping[str, Module], settings: ModelSettings) -> None:
        self.model, self.modules, self.config = model, modules, settings.policy
        self.adapters = AdapterSet(modules, self.networks())
        self.rollouts: Model | None = None
        """Generates the training samples with the same networks where they have a size of their own."""

    @classmethod
    def builder(
        cls, model_class: Callable[[Any, tuple[int, int], Any], Any], modules: Mapping[str, Module]
    ) -> Callable[[Any, ModelSettings], Model]:
        """Returns a ``Family.build`` that calls ``model_class(pipeline, size, options)``."""
        return lambda pipeline, settings: cls(model_class(pipeline, settings.size, settings.options), modules, settings)

    @property
    def text_tokens(self) -> Callable[[str], tuple[int, int]] | None:
        """Counts a prompt's tokens and how many are read; None for a model that cuts no prompt."""
        return getattr(self.model, "text_tokens", None)

    def networks(self) -> dict[str, Any]:
        """Returns the model of transformers or diffusers that each module's LoRA is put on."""
        ((name, module),) = self.modules.items()
        return {name: self.model.transformer if module.kind == "flow" else self.model.network}

    def part(self, module: str, sampler: SamplerConfig) -> Any:
        """Returns the `FlowModel` or `TokenModel` of a module; ``sampler`` samples the other module's part."""
        return self.model

    @torch.no_grad()
    def generate(self, records: Sequence[PromptRecord], seeds: Sequence[int], sampler: SamplerConfig) -> list[Sample]:
        """Generates one sample per record; each depends only on its record, its seed and the weights."""
        if not records:
            return []
        if len(seeds) < len(records):
            raise UserError(f"expected a seed for each record, got {len(seeds)} seeds and {len(records)} records")
        records, seeds = [checked_record(record) for record in records], [index(seed) for seed in seeds]
        name, module = list(self.modules.items())[-1]
        model = self.part(name, sampler)
        if module.kind == "tokens":
            sampled = sample_with_adapter(model, records, seeds, sampler, self.config)
            return list(model.samples(records, sampled.trajectory, seeds))
        denoiser, guidance_scale = Denoiser(model, self.config), sampler.denoising()[1]
        images: dict[int, Sample] = {}
        for rows in rows_by_source_count(records):
            row_seeds = [seeds[row] for row in rows]
            conditions = model.conditions([records[row] for row in rows], row_seeds, guidance_scale)
            images |= dict(zip(rows, denoiser.generate(conditions, row_seeds, sampler), strict=True))
        return [images[row] for row in range(len(records))]

    def policy(
        self,
        module: str,
        *,
        rollout: SamplerConfig,
        evaluation: SamplerConfig,
        kl_reference: bool = False,
        forward_process: bool = False,
    ) -> AdapterPolicy[Any]:
        """Returns the policy of a module that has an adapter.

        ``rollout`` is for its training samples; ``evaluation`` for what an earlier, fixed module makes for it
        (GLM-Image's tokens for its decoder).
        """
        adapter, part = self.adapters[module], (self.rollouts or self).part
        if self.modules[module].kind == "tokens":
            return TokenPolicy(part(module, rollout), adapter, rollout, self.config, kl_reference=kl_reference)
        model = part(module, evaluation)
        if getattr(model, "distilled", False) and ranks.rank() == 0:
            console.note(DISTILLED)
        decisions = {"kl_reference": kl_reference, "forward_process": forward_process}
        return FlowPolicy(model, adapter, rollout, self.config, **decisions)

    def joint_policy(self, outer: Any, inner: Any) -> Any:
        """Returns the policy of two modules that one rollout trains; it has ``joint_rollout``."""
        raise NotImplementedError


class DistributedModel:
    """A `Model` of which each rank generates its block of the records."""

    def __init__(self, local: Model) -> None:
        self.local, self.adapters, self.text_tokens = local, local.adapters, local.text_tokens

    def generate(self, records: Sequence[PromptRecord], seeds: Sequence[int], sampler: SamplerConfig) -> list[Sample]:
        block = ranks.block(len(records))
        own, its_seeds = records[block], seeds[block]
        parts = ranks.all_gather(lambda: list(self.local.generate(own, its_seeds, sampler)) if own else [])
        return [sample for part in parts for sample in part]
