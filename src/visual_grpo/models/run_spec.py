"""A command's parameters resolved for its model, and refusals of what the model's family does not support."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from visual_grpo.common.decisions import Likelihoods, Matches
from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.config import (
    ControlConfig,
    FlowConfig,
    ModelConfig,
    Parameters,
    PolicyConfig,
    SamplerConfig,
    SamplingConfig,
)
from visual_grpo.config.policy import FlowSettings, TokenSettings
from visual_grpo.grpo.losses import LOSSES, average_decay, is_forward_process, unread_clips
from visual_grpo.models.family import Family, find_family
from visual_grpo.models.module import Kind, ModelSettings

if TYPE_CHECKING:
    from visual_grpo.models.model import Model

_SETTINGS = {"tokens": TokenSettings.model_fields, "flow": FlowSettings.model_fields}
"""Kind of module -> the settings of a sampler that only it has."""
_GENERATES = {"tokens": "tokens", "flow": "denoising steps"}


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """The parameters of a command, resolved once for its model."""

    config: Parameters
    model: str
    """Folder or hub id of the base model."""
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
        return resolve, (self.config, self.model)

    def __deepcopy__(self, memo: object) -> RunSpec:
        return self


def resolve(config: Parameters, model: str | None = None, *, family: Family | None = None) -> RunSpec:
    """Raises UserError, with what the model's family supports, for parameters that it does not.

    Args:
        model: folder or hub id; None = ``model.path``.
        family: of the model; None = the one that ``model.family`` names.
    """
    family = family or find_family(config.model.family, model or config.model.path, config.model.revision)
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
    if problem := next(_problems(family, config, modules), None):
        raise UserError(problem)
    rollout = _rollout_sampler(family, config.sampling)
    return RunSpec(
        config=config,
        model=model or config.model.path,
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
    """Tokens without truncation, at temperature 1 where none is set."""
    sampler = SamplerConfig(**sampling.rollout.model_dump(include=set(SamplerConfig.model_fields)))
    if "tokens" not in family.kinds():
        return sampler
    temperature = 1.0 if sampler.temperature is None else sampler.temperature
    return sampler.model_copy(update={"temperature": temperature, "top_p": 1.0, "top_k": 0})


def _judged_samplers(family: Family, rollout: SamplerConfig, config: Parameters) -> dict[str, SamplerConfig]:
    """``rollout`` samples tokens as in training, ``sde`` denoises as in training, ``eval`` is the plain pipeline."""
    samplers = {}
    if "tokens" in family.kinds():
        samplers["rollout"] = rollout
    stochastic = "flow" in family.kinds() and not is_forward_process(config.grpo.loss)
    if stochastic and _window_fits(config.policy.flow, rollout.steps or 0):
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
    lacking = {key for kind, keys in _SETTINGS.items() if kind not in family.kinds() for key in keys}
    for control in controls:
        changes = {key: value for key, value in control.changes().items() if getattr(sampler, key) != value}
        if changes and not lacking & control.changes().keys():
            name = " ".join(["eval", *(f"{key}={value:g}" for key, value in changes.items())])
            samplers[name] = sampler.model_copy(update=changes)
    return samplers


def _problems(family: Family, config: Parameters, modules: tuple[str, ...]) -> Iterator[str]:
    """Yields a sentence for each parameter that the family or a different parameter rules out."""
    yield from _sampler_problems(family, config.sampling)
    if (size := config.sampling.rollout.size()) and "flow" not in family.kinds():
        yield (
            f"sampling.rollout.{next(iter(size))} is {next(iter(size.values()))}, but {family.name} generates no"
            " pictures. Leave it out; its images have data.height and data.width."
        )
    policy, grpo, offload = config.policy, config.grpo, config.model.offload
    joint, kinds = policy.stages == "joint", family.kinds()
    if joint:
        yield from _joint_problems(config, modules)
    for name in modules:
        yield from _module_problems(name, family.modules[name].kind, config)
    flows = [name for name in modules if family.modules[name].kind == "flow"]
    if flows:
        yield from _flow_problems(flows[0], grpo.loss, policy, config.sampling.rollout.steps or 0)
    scale = policy.decode_guidance_scale
    decodes = "flow" in kinds and any(family.modules[name].kind == "tokens" for name in modules)
    # None or 1 as conf/base has it, which configurations of other families are differences from.
    if scale not in (None, 1.0) and (not decodes or joint):
        yield (
            f"policy.decode_guidance_scale is {scale:g}, which changes nothing: it is for the pictures of a token"
            " module that is trained on its own rollouts. Set it to null; guidance elsewhere is"
            " sampling.rollout.guidance_scale."
        )
    if offload != "none" and "flow" not in kinds:
        yield (
            f"model.offload is {offload}, but {family.name} is one network, which is always needed; only a model of"
            " several networks can keep one on the GPU at a time. Set it to none."
        )
    yield from _exclusions(config.model, config.distributed.sharded)


def _module_problems(name: str, kind: Kind, config: Parameters) -> Iterator[str]:
    loss, grpo, draws = config.grpo.loss, config.grpo_of(name), config.policy.flow.draws
    needs = LOSSES[loss].needs
    # A flow module offers stochastic steps and noised samples.
    if not issubclass(Matches if kind == "flow" else Likelihoods, needs):
        yield (
            f"grpo.loss is {loss}, which needs {needs.described}, and {name} has none. Set a different loss, or train"
            " only a different module (policy.train)."
        )
    if unread := unread_clips(grpo):
        yield (
            f"grpo.loss is {loss}, which has no {' and no '.join(unread)}: {name} would not be clipped. Set"
            f" {'it' if len(unread) == 1 else 'them'} to null, or set a loss that clips, such as grpo."
        )
    if grpo.target_kl is not None and LOSSES[loss].average_samples and average_decay(grpo):
        yield (
            f"grpo.target_kl compares {name} with its weights at the rollout, but {loss} samples with an average of"
            " them. Set grpo.average_decay=0, or leave target_kl out."
        )
    if grpo.sampler_correction is not None and is_forward_process(loss):
        yield (
            f"grpo.sampler_correction weighs decisions by their log-probs, but {loss} takes a sample without any. Leave"
            " it out."
        )
    elif grpo.sampler_correction is not None and not grpo.replays(config.model.dtype):
        yield (
            "grpo.sampler_correction corrects to the replay, so grpo.old_log_probs has to be replay; it is"
            f" {grpo.old_log_probs} with model.dtype {config.model.dtype}."
        )
    if kind == "flow" and draws > grpo.updates_per_rollout:
        yield (
            f"policy.flow.draws is {draws}, but the updates of a rollout take one draw each, and {name} has only"
            f" {grpo.updates_per_rollout}. Lower it, or raise grpo.updates_per_rollout."
        )


def _joint_problems(config: Parameters, modules: tuple[str, ...]) -> Iterator[str]:
    grpo, others = config.grpo, "set policy.stages=alternating"
    if grpo.max_refills or grpo.rollout_prompts:
        yield (
            "policy.stages is joint, which generates one rollout of all prompts a step: it has neither grpo.max_refills"
            f" nor grpo.rollout_prompts. Leave them out, or {others}."
        )
    for name in modules:
        if (own := config.grpo_of(name).prompts_per_step) != grpo.prompts_per_step:
            yield (
                "policy.stages is joint, which takes the same prompts for all modules, but"
                f" modules.{name}.prompts_per_step is {own} and grpo.prompts_per_step {grpo.prompts_per_step}. Leave"
                f" the first out, or {others}."
            )
    if len(modules) < 2:
        yield (
            f"policy.stages is joint, which trains two modules from one rollout, but only {modules[0]} is trained;"
            " leave policy.stages out, or train all modules (policy.train=all)."
        )


def _exclusions(model: ModelConfig, sharded: bool) -> Iterator[str]:
    """Yields a sentence for each two parameters of how the model is held that exclude each other."""
    whole = ("model.base_weights", model.base_weights, "full")
    sharding = ("distributed.sharded", sharded)
    offload = ("model.offload", model.offload, "none")
    uncompiled = ("model.compile", str(model.compile).lower(), "false")
    for (setting, is_set), (name, value, required), why in (
        (sharding, offload, "no network is whole on a GPU, to be moved off it"),
        (sharding, whole, "only weights of full precision are sharded"),
        (sharding, uncompiled, "a compiled block cannot gather its layers"),
        (("model.compile", model.compile), whole, "only layers of full precision are compiled"),
    ):
        if is_set and value != required:
            yield f"{setting} is true, and {name} is {value}: {why}. Set {name} to {required}."


def _sampler_problems(family: Family, sampling: SamplingConfig) -> Iterator[str]:
    for name, sampler in (("rollout", sampling.rollout), ("eval", sampling.eval)):
        for kind, keys in _SETTINGS.items():
            supported = kind in family.kinds()
            present = [key for key in keys if getattr(sampler, key) is not None]
            if present and not supported:
                yield (
                    f"sampling.{name} sets {', '.join(present)}, but {family.name} has no {_GENERATES[kind]}; remove"
                    " it, or set it to null where conf/base sets it."
                )
            missing = [key for key in keys if key not in present]
            if missing and kind == "flow" and supported:
                yield f"sampling.{name} needs {', '.join(missing)}: {family.name} has denoising steps."


def _flow_problems(module: str, loss: str, policy: PolicyConfig, steps: int) -> Iterator[str]:
    flow, forward_process = policy.flow, is_forward_process(loss)
    if unread := flow.unread(forward_process=forward_process):
        back = ", ".join(f"policy.flow.{name}={value}" for name, value in unread.items())
        yield f"grpo.loss is {loss}, which has no {', '.join(unread)} of policy.flow. Set {back}."
    if forward_process and policy.share_start_noise:
        yield (
            f"grpo.loss is {loss}, whose samples of a prompt differ by their start noise alone: with"
            " policy.share_start_noise=true they are one picture. Leave it out."
        )
    trained = flow.trained_steps(flow.stochastic_steps(steps) * flow.draws)
    if LOSSES[loss].whole_rows and trained > 1:
        yield (
            f"grpo.loss is {loss}, which needs all decisions of a row at once, but the {trained} trained steps of"
            f" {module} are replayed one at a time, to hold one graph in memory. Set a different loss, or train one"
            " step (policy.flow.window_steps=1)."
        )
    if steps < 2:
        yield (
            f"sampling.rollout.steps is {steps}: the last denoising step has no variance and cannot be trained, so a"
            " rollout needs at least 2."
        )
    if not _window_fits(flow, steps):
        yield (
            f"policy.flow: the window (window_start {flow.window_start}, window_steps {flow.window_steps}) must end"
            f" before the last of sampling.rollout.steps = {steps} denoising steps, which has no variance:"
            f" at most {steps - 1} steps, 0 to {steps - 2}."
        )


def _window_fits(flow: FlowConfig, steps: int) -> bool:
    return (flow.window_start or 0) + (flow.window_steps or 1) <= steps - 1


def _require_module(family: Family, name: str, where: str) -> None:
    if name not in family.modules:
        raise UserError(f"{where} names {name!r}.{nearest_hint(name, family.modules)} {_modules_of(family)}")


def _modules_of(family: Family) -> str:
    return f"The family {family.name} has the modules: {', '.join(family.modules)}."
