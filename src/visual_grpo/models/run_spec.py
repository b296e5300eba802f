"""A command's parameters, resolved for its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.config import ControlConfig, Parameters, PolicyConfig, SamplerConfig, SamplingConfig
from visual_grpo.grpo.losses import is_forward_process
from visual_grpo.models.family import Family, find_family
from visual_grpo.models.module import ModelSettings
from visual_grpo.models.ruled_out import SETTINGS, ruled_out, window_fits

if TYPE_CHECKING:
    from visual_grpo.models.model import Model


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """The parameters of a command, resolved once for its model."""

    config: Parameters
    family: Family
    modules: tuple[str, ...]
    """Trained modules, in the order in which they generate."""
    joint: bool
    """True if one rollout trains two modules."""
    rollout: SamplerConfig
    """Generates training samples."""
    samplers: dict[str, SamplerConfig]
    """Samplers of the evaluation, by name."""
    controls: dict[str, SamplerConfig]
    """More samplers for the base model alone, by name, as ``eval guidance_scale=3``."""
    options: Any
    """``model.options`` as the family's own class."""

    @property
    def settings(self) -> ModelSettings:
        """Returns the settings that the family builds the model with."""
        data = self.config.data
        return ModelSettings(
            size=(data.height, data.width),
            frames=data.frames,
            fps=data.fps,
            policy=self.config.policy,
            options=self.options,
        )

    @property
    def rollout_settings(self) -> ModelSettings:
        """Returns the settings of the training samples, whose size ``sampling.rollout`` may name."""
        size = self.config.sampling.rollout.size()
        height, width = self.settings.size
        return replace(
            self.settings,
            size=(size.get("height", height), size.get("width", width)),
            frames=size.get("frames", self.settings.frames),
        )

    def sampler(self, name: str) -> SamplerConfig:
        """Returns the sampler ``eval``, or for ``rollout`` that of training samples: of a model without tokens, its
        denoising steps are as stochastic as in training."""
        return self.samplers.get(name) or self.samplers.get("sde", self.rollout)

    @property
    def forward_process(self) -> bool:
        """True if flow modules train on noised samples of the ODE instead of stochastic steps."""
        return is_forward_process(self.config.grpo.loss)

    def build(self, loaded: Any) -> Model:
        """Builds the model from what ``family.load`` has returned, with training samples of their own size.

        Raises UserError for a sampler's steps that the model's scheduler cannot take.
        """
        built = self.family.build(loaded, self.settings)
        if self.rollout_settings != self.settings:
            built.rollouts = self.family.build(loaded, self.rollout_settings)
        for name, module in self.family.modules.items():
            for sampler in self.denoised.values() if module.kind == "flow" else ():
                built.part(name, sampler).schedule(sampler.denoising()[0])
        return built

    @property
    def denoised(self) -> dict[str, SamplerConfig]:
        """The samplers of training and evaluation by their names."""
        return {"sampling.rollout": self.rollout, "sampling.eval": self.config.sampling.eval, **self.controls}

    def __reduce__(self) -> tuple[Any, ...]:
        """A different process resolves again, since a family holds functions."""
        return resolve, (self.config,)

    def __deepcopy__(self, memo: object) -> RunSpec:
        return self


def resolve(config: Parameters, *, family: Family | None = None) -> RunSpec:
    """Raises UserError, with what the model's family supports, for parameters that it does not.

    Args:
        family: of the model; None = the one that ``model.family`` names.
    """
    family = family or find_family(config.model.family, config.model.path, config.model.revision)
    if config.data.task not in family.tasks:
        raise UserError(
            f"data.task is {config.data.task}, which {family.name} cannot do; it has {', '.join(family.tasks)}."
        )
    family.check_frames(config.data.frames)
    if config.sampling.rollout.frames is not None:
        family.check_frames(config.sampling.rollout.frames, "sampling.rollout.frames")
    for name in config.modules:
        _require_module(family, name, "modules")
    modules = trained_modules(family, config.policy)
    if problem := next(ruled_out(family, config, modules), None):
        raise UserError(problem)
    rollout = _rollout_sampler(family, config.sampling)
    return RunSpec(
        config=config,
        family=family,
        modules=modules,
        joint=config.policy.stages == "joint",
        rollout=rollout,
        samplers=_judged_samplers(family, rollout, config),
        controls=_control_samplers(family, config.sampling.eval, config.evaluation.controls),
        options=options_of(family, config.model.options),
    )


def trained_modules(family: Family, policy: PolicyConfig) -> tuple[str, ...]:
    """The modules that ``policy.train`` names, in the order in which they generate.

    Raises UserError for a module that the family does not have.
    """
    asked = [policy.train] if isinstance(policy.train, str) else policy.train
    if asked == ["all"]:
        return tuple(family.modules)
    for name in asked:
        _require_module(family, name, "policy.train")
    if not asked:
        raise UserError(f"policy.train is empty. {_modules_of(family)} all trains every one of them.")
    return tuple(name for name in family.modules if name in asked)


def options_of(family: Family, options: dict[str, object]) -> Any:
    """``model.options`` as the family's own class; raises UserError naming each option that does not fit.

    One that the family does not have may be null, as where a configuration replaces another's.
    """
    known = list(family.options.model_fields)
    try:
        return family.options(**{name: value for name, value in options.items() if value is not None or name in known})
    except ValidationError as error:
        lines = [
            f"  model.options.{'.'.join(map(str, e['loc']))}: {e['msg'].removeprefix('Value error, ')}"
            + nearest_hint(str(e["loc"][-1]) if e["loc"] else "", known)
            for e in error.errors()
        ]
        has = f"has the options {', '.join(known)}" if known else "has no options"
        drop = "" if all(e["type"] != "extra_forbidden" for e in error.errors()) else " (null leaves an option out)"
        raise UserError("\n".join([f"The family {family.name} {has}{drop}:", *lines])) from error


def _rollout_sampler(family: Family, sampling: SamplingConfig) -> SamplerConfig:
    sampler = SamplerConfig(**sampling.rollout.model_dump(include=set(SamplerConfig.model_fields)))
    return sampler.untruncated() if "tokens" in family.kinds() else sampler


def _judged_samplers(family: Family, rollout: SamplerConfig, config: Parameters) -> dict[str, SamplerConfig]:
    """``rollout`` samples tokens as in training, ``sde`` denoises as in training, ``eval`` is the plain pipeline."""
    samplers = {}
    if "tokens" in family.kinds():
        samplers["rollout"] = rollout
    stochastic = "flow" in family.kinds() and not is_forward_process(config.grpo.loss)
    if stochastic and window_fits(config.policy.flow, rollout.steps or 0):
        samplers["sde"] = rollout.model_copy(update={"stochastic": True})
    return samplers | {"eval": config.sampling.eval}


def _control_samplers(
    family: Family, sampler: SamplerConfig, controls: Sequence[ControlConfig]
) -> dict[str, SamplerConfig]:
    """The eval sampler with the changes of each of ``evaluation.controls``.

    None that equals the eval sampler itself, and none of what the family does not have: conf/base has controls for
    tokens and for denoising.
    """
    samplers = {}
    lacking = {key for kind, keys in SETTINGS.items() if kind not in family.kinds() for key in keys}
    for control in controls:
        changes = {key: value for key, value in control.changes().items() if getattr(sampler, key) != value}
        if changes and not lacking & control.changes().keys():
            name = " ".join(["eval", *(f"{key}={value:g}" for key, value in changes.items())])
            samplers[name] = sampler.model_copy(update=changes)
    return samplers


def _require_module(family: Family, name: str, where: str) -> None:
    if name not in family.modules:
        raise UserError(f"{where} names {name!r}.{nearest_hint(name, family.modules)} {_modules_of(family)}")


def _modules_of(family: Family) -> str:
    return f"The family {family.name} has the modules: {', '.join(family.modules)}."
