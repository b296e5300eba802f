"""What the parameters say for a model family, and whether they fit it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.config import Parameters, PolicyConfig, SamplerConfig, SamplingConfig
from visual_grpo.models.family import Family

_KEYS = {"tokens": ("temperature", "top_p", "top_k"), "flow": ("steps", "guidance_scale")}
"""Kind of module -> the settings of a sampler that only it has."""
_GENERATES = {"tokens": "tokens", "flow": "denoising steps"}


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What a configuration asks of a model family."""

    family: Family
    modules: tuple[str, ...]
    """Those that are trained, in the order in which they generate."""
    joint: bool
    """True if one rollout trains two modules."""
    rollout: SamplerConfig
    """How training samples are drawn."""
    samplers: dict[str, SamplerConfig]
    """What the evaluation reports, by name."""
    controls: dict[str, SamplerConfig]
    """What the base model alone is evaluated with beside these, by name, as ``eval guidance_scale=3``."""
    options: Any
    """``model.options`` as the family's own class."""


def make_run_spec(family: Family, config: Parameters) -> RunSpec:
    """Raises UserError where the parameters ask for something that the family does not have; says what it has."""
    if config.data.task not in family.tasks:
        raise UserError(
            f"data.task is {config.data.task}, which {family.name} cannot do; it has {', '.join(family.tasks)}."
        )
    for name in config.modules:
        _require_module(family, name, "modules")
    modules = trained_modules(family, config.policy)
    _check_samplers(family, config.sampling)
    _check_stages(config, modules)
    _check_flow(family, config, modules)
    _check_decode_guidance(family, config, modules)
    _check_memory(family, config)
    rollout = _rollout_sampler(family, config.sampling)
    return RunSpec(
        family=family,
        modules=modules,
        joint=config.policy.stages == "joint",
        rollout=rollout,
        samplers=_judged_samplers(family, config, rollout),
        controls=_control_samplers(family, config),
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


def options_of(family: Family, given: dict[str, object]) -> Any:
    """``model.options`` as the family's own class; raises UserError naming each option that does not fit."""
    try:
        return family.options(**given)
    except ValidationError as error:
        known = list(family.options.model_fields)
        lines = [
            f"  model.options.{'.'.join(map(str, e['loc']))}: {e['msg'].removeprefix('Value error, ')}"
            + nearest_hint(str(e["loc"][-1]) if e["loc"] else "", known)
            for e in error.errors()
        ]
        has = f"has the options {', '.join(known)}" if known else "has no options"
        raise UserError("\n".join([f"The family {family.name} {has}:", *lines])) from error


def _rollout_sampler(family: Family, sampling: SamplingConfig) -> SamplerConfig:
    """Tokens without truncation, at temperature 1 where none is set."""
    if "tokens" not in family.kinds():
        return sampling.rollout
    temperature = 1.0 if sampling.rollout.temperature is None else sampling.rollout.temperature
    return sampling.rollout.model_copy(update={"temperature": temperature, "top_p": 1.0, "top_k": 0})


def _judged_samplers(family: Family, config: Parameters, rollout: SamplerConfig) -> dict[str, SamplerConfig]:
    """``rollout`` draws tokens as in training, ``sde`` denoises as in training, ``eval`` is the plain pipeline."""
    samplers = {}
    if "tokens" in family.kinds():
        samplers["rollout"] = rollout
    if "flow" in family.kinds() and _window_fits(config):
        samplers["sde"] = rollout.model_copy(update={"stochastic": True})
    return samplers | {"eval": config.sampling.eval}


def _control_samplers(family: Family, config: Parameters) -> dict[str, SamplerConfig]:
    """The eval sampler with the changes of each of ``evaluation.controls``.

    None that equals the eval sampler itself, and none of what the family does not have: conf/base has controls for
    tokens and for denoising.
    """
    sampler, samplers = config.sampling.eval, {}
    lacking = {key for kind, keys in _KEYS.items() if kind not in family.kinds() for key in keys}
    for control in config.evaluation.controls:
        changes = {key: value for key, value in control.changes().items() if getattr(sampler, key) != value}
        if changes and not lacking & control.changes().keys():
            name = " ".join(["eval", *(f"{key}={value:g}" for key, value in changes.items())])
            samplers[name] = sampler.model_copy(update=changes)
    return samplers


def _check_samplers(family: Family, sampling: SamplingConfig) -> None:
    for name, sampler in (("rollout", sampling.rollout), ("eval", sampling.eval)):
        for kind, keys in _KEYS.items():
            given = [key for key in keys if getattr(sampler, key) is not None]
            if given and kind not in family.kinds():
                raise UserError(
                    f"sampling.{name} sets {', '.join(given)}, but {family.name} has no {_GENERATES[kind]}; remove it,"
                    " or set it to null where conf/base sets it."
                )
            missing = [key for key in keys if key not in given]
            if missing and kind == "flow" and kind in family.kinds():
                raise UserError(f"sampling.{name} needs {', '.join(missing)}: {family.name} has denoising steps.")


def _check_stages(config: Parameters, modules: tuple[str, ...]) -> None:
    joint, grpo = config.policy.stages == "joint", config.grpo
    if joint and (grpo.max_refills or grpo.rollout_prompts):
        raise UserError(
            "policy.stages is joint, which draws one rollout of all prompts a step: it has neither grpo.max_refills"
            " nor grpo.rollout_prompts. Leave them out, or set policy.stages=alternating."
        )
    if joint and len(modules) < 2:
        raise UserError(
            f"policy.stages is joint, which trains two modules from one rollout, but only {modules[0]} is trained;"
            " leave policy.stages out, or train all modules (policy.train=all)."
        )


def _check_flow(family: Family, config: Parameters, modules: tuple[str, ...]) -> None:
    trained = [name for name in modules if family.modules[name].kind == "flow"]
    for name in trained:
        if config.grpo_of(name).kl_correction:
            raise UserError(
                f"kl_correction is for the KL of tokens, which is estimated from the samples; that of {name}'s"
                f" denoising steps is exact. Set it for another module, or modules.{name}.kl_correction=false."
            )
    flow, steps = config.policy.flow, config.sampling.rollout.steps or 0
    if not trained or _window_fits(config):
        return
    if steps < 2:
        raise UserError(
            f"sampling.rollout.steps is {steps}: the last denoising step has no variance and cannot be trained, so a"
            " rollout needs at least 2."
        )
    raise UserError(
        f"policy.flow: the window (window_start {flow.window_start}, window_steps {flow.window_steps}) must end"
        f" before the last of sampling.rollout.steps = {steps} denoising steps, which has no variance:"
        f" at most {steps - 1} steps, 0 to {steps - 2}."
    )


def _window_fits(config: Parameters) -> bool:
    flow, steps = config.policy.flow, config.sampling.rollout.steps or 0
    return (flow.window_start or 0) + (flow.window_steps or 1) <= steps - 1


def _check_decode_guidance(family: Family, config: Parameters, modules: tuple[str, ...]) -> None:
    scale = config.policy.decode_guidance_scale
    decodes = "flow" in family.kinds() and any(family.modules[name].kind == "tokens" for name in modules)
    # None or 1 as conf/base has it, which configurations of other families are differences from.
    if scale not in (None, 1.0) and (not decodes or config.policy.stages == "joint"):
        raise UserError(
            f"policy.decode_guidance_scale is {scale:g}, which changes nothing: it is for the pictures of a token"
            " module that is trained on its own rollouts. Set it to null; guidance elsewhere is"
            " sampling.rollout.guidance_scale."
        )


def _check_memory(family: Family, config: Parameters) -> None:
    model = config.model
    if model.offload != "none" and "flow" not in family.kinds():
        raise UserError(
            f"model.offload is {model.offload}, but {family.name} is one network, which is always needed; only"
            " a model of several can have them take turns on the GPU. Set it to none."
        )
    if not config.distributed.sharded:
        return
    for name, value, fits, why in (
        ("model.offload", model.offload, "none", "networks that are cut have nothing that could take turns"),
        ("model.base_weights", model.base_weights, "full", "only weights of full precision are cut"),
        ("policy.kv_cache", config.policy.kv_cache, "growing", "a CUDA graph cannot gather layers for every token"),
    ):
        if value != fits:
            raise UserError(f"distributed.sharded is true, and {name} is {value}: {why}. Set {name} to {fits}.")


def _require_module(family: Family, name: str, where: str) -> None:
    if name not in family.modules:
        raise UserError(f"{where} names {name!r}.{nearest_hint(name, family.modules)} {_modules_of(family)}")


def _modules_of(family: Family) -> str:
    return f"The family {family.name} has the modules: {', '.join(family.modules)}."
