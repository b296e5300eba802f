"""What a model family is, said in one place per family.

A family names its modules, tasks, options, adapter formats and saved classes, and knows how to load and build its
model. Generic code asks the family and never imports a model's package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from visual_grpo.config import ModelConfig, PolicyConfig, SamplerConfig, Strict, Task

if TYPE_CHECKING:
    from visual_grpo.common.types import JointPolicy, Policy, PromptRecord, Sample
    from visual_grpo.models.lora import Adapter, AdapterSet

Kind = Literal["tokens", "flow"]
"""What a module's decisions are: generated tokens, or stochastic denoising steps."""


@dataclass(frozen=True, kw_only=True)
class Module:
    """A part of a model that can be trained."""

    kind: Kind
    adapter: type[Adapter]
    """How its LoRA is put on and saved."""
    targets: str | list[str]
    """peft's target_modules: the matrices that get a LoRA where the parameters name none."""
    advice: str
    """What to change where the signal check finds nothing to learn for this module."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """What a family builds its model with."""

    size: tuple[int, int]
    """(height, width) in pixels."""
    policy: PolicyConfig
    options: Any
    """The family's own options, an instance of `Family.options`."""


class Model(Protocol):
    """A loaded model with the adapters of its modules, as training and evaluation see it."""

    @property
    def adapters(self) -> AdapterSet: ...

    def generate(
        self, records: Sequence[PromptRecord], seeds: Sequence[int], sampler: SamplerConfig
    ) -> Sequence[Sample]:
        """One sample per record; each depends only on its record, its seed and the weights."""
        ...

    def policy(
        self, module: str, *, rollout: SamplerConfig, stock: SamplerConfig, kl_reference: bool = False
    ) -> Policy[Any]:
        """The policy of a module that has an adapter; training samples are drawn as ``rollout`` says."""
        ...


class TwoStageModel(Model, Protocol):
    """A `Model` of two modules that one rollout can train."""

    def joint_policy(self, outer: Policy[Any], inner: Policy[Any]) -> JointPolicy: ...


class NoOptions(Strict):
    """For a family that has no options."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of model."""

    name: str
    modules: Mapping[str, Module]
    """By name, in the order in which they generate."""
    tasks: tuple[Task, ...]
    saved_as: tuple[str, ...]
    """Classes that a saved model names in its model_index.json or config.json."""
    load: Callable[[str, ModelConfig], Any]
    """(folder or hub id, config) -> the pipeline or model, frozen and in evaluation mode. Raises UserError."""
    build: Callable[[Any, ModelSettings], Model]
    """Makes a `Model` of what ``load`` gave."""
    options: type[Strict] = field(default=NoOptions)
    """``model.options`` of this family."""

    def kinds(self) -> set[Kind]:
        return {module.kind for module in self.modules.values()}
