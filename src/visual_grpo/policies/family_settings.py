"""What the parameters say for a model family, and whether they fit it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from visual_grpo.config import (
    ControlConfig,
    GRPOConfig,
    Parameters,
    PolicyConfig,
    SamplerConfig,
    SamplingConfig,
)
from visual_grpo.errors import UserError, nearest_hint
from visual_grpo.policies.family import Family

_TOKEN_KEYS = ("temperature", "top_p", "top_k")
_FLOW_KEYS = ("steps", "guidance_scale")
_KINDS = (("tokens", _TOKEN_KEYS, "tokens"), ("flow", _FLOW_KEYS, "denoising steps"))
"""Kind of module, the settings of a sampler that only it has, and what it generates."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a configuration asks of a model family."""

    family: Family
    modules: tuple[str, ...]
    """Those that are trained, in the order in which they generate."""
    joint: bool
    """Whether one rollout trains two modules."""
    rollout: SamplerConfig
    """How training samples are drawn."""
    samplers: dict[str, SamplerConfig]
    """What the evaluation reports, by name."""
    controls: dict[str, SamplerConfig]
    """What the base model alone is evaluated with beside these, by name, as ``stock guidance_scale=3``."""
    options: Any
    """``model.options`` as the family's own class."""


def make_plan(family: Family, config: Parameters) -> Plan:
    """Raises UserError where the parameters ask for something that the family does not have; says what it has."""
    check_family(family, config)
    modules = trained_modules(family, config.policy)
    return Plan(
        family=family,
        modules=modules,
        joint=is_joint(family, config.policy),
        rollout=rollout_sampler(family, config.sampling),
        samplers=judged_samplers(family, config),
        controls=control_samplers(family, config),
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


def is_joint(family: Family, policy: PolicyConfig) -> bool:
    """Whether one rollout trains two modules."""
    return policy.stages == "joint" and len(trained_modules(family, policy)) > 1


def _check_stages(family: Family, policy: PolicyConfig, grpo: GRPOConfig) -> None:
    trained = trained_modules(family, policy)
    if policy.stages == "joint" and (grpo.max_refills or grpo.rollout_prompts):
        raise UserError(
            "policy.stages is joint, which draws one rollout of all prompts a step: it has neither grpo.max_refills"
            " nor grpo.rollout_prompts. Leave them out, or set policy.stages=alternating."
        )
    if policy.stages == "joint" and len(trained) < 2:
        raise UserError(
            f"policy.stages is joint, which trains two modules from one rollout, but only {trained[0]} is trained;"
            " leave policy.stages out, or train all modules (policy.train=all)."
        )


def rollout_sampler(family: Family, sampling: SamplingConfig) -> SamplerConfig:
    """How training samples are drawn: tokens without truncation, at temperature 1 where none is set."""
    if "tokens" not in family.kinds():
        return sampling.rollout
    temperature = 1.0 if sampling.rollout.temperature is None else sampling.rollout.temperature
    return sampling.rollout.model_copy(update={"temperature": temperature, "top_p": 1.0, "top_k": 0})


def judged_samplers(family: Family, config: Parameters) -> dict[str, SamplerConfig]:
    """What the evaluation reports, by name.

    ``rollout`` draws tokens as in training, ``sde`` denoises as in training, ``stock`` is the plain pipeline. A family
    has those of its kinds of module.
    """
    rollout, samplers = rollout_sampler(family, config.sampling), {}
    if "tokens" in family.kinds():
        samplers["rollout"] = rollout
    if "flow" in family.kinds() and _window_fits(config):
        samplers["sde"] = rollout.model_copy(update={"stochastic": True})
    return samplers | {"stock": config.sampling.stock}


def control_samplers(family: Family, config: Parameters) -> dict[str, SamplerConfig]:
    """The stock sampler with the changes of each of ``evaluation.controls``, by name.

    None twice, none that equals the stock sampler itself, and none of what the family does not have: conf/base has
    controls for tokens and for denoising.
    """
    stock, samplers = config.sampling.stock, {}
    lacking = {
        key
        for kind, keys in (("tokens", _TOKEN_KEYS), ("flow", _FLOW_KEYS))
        if kind not in family.kinds()
        for key in keys
    }
    for control in config.evaluation.controls:
        if lacking & control.changes().keys():
            continue
        changes = {key: value for key, value in control.changes().items() if getattr(stock, key) != value}
        if changes:
            name = " ".join(["stock", *(f"{key}={value:g}" for key, value in changes.items())])
            samplers[name] = stock.model_copy(update=changes)
    return samplers


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


def check_family(family: Family, config: Parameters) -> None:
    """Raises UserError where the parameters ask for something that the family does not have; says what it has."""
    if config.data.task not in family.tasks:
        raise UserError(
            f"data.task is {config.data.task}, which {family.name} cannot do; it has {', '.join(family.tasks)}."
        )
    for name in config.modules:
        _require_module(family, name, "modules")
    _check_samplers(family, config.sampling)
    _check_groups(family, config)
    _check_stages(family, config.policy, config.grpo)
    _check_window(family, config)
    _check_kl_correction(family, config)
    _check_decode_guidance(family, config)
    _check_offload(family, config)
    _check_shards(config)
    options_of(family, config.model.options)


def _check_offload(family: Family, config: Parameters) -> None:
    if config.model.offload != "none" and "flow" not in family.kinds():
        raise UserError(
            f"model.offload is {config.model.offload}, but {family.name} is one network, which is always needed; only"
            " a model of several can have them take turns on the GPU. Set it to none."
        )


def _check_shards(config: Parameters) -> None:
    if not config.distributed.sharded:
        return
    if config.model.offload != "none":
        raise UserError(
            f"distributed.sharded is true, and model.offload is {config.model.offload}: networks that are cut have"
            " nothing that could take turns. Set one of them to false or none."
        )
    if config.model.base_weights != "full":
        raise UserError(
            f"distributed.sharded is true, and model.base_weights is {config.model.base_weights}: only weights of full"
            " precision are cut, not codes of fewer bits. Set one of them to false or full."
        )
    if config.policy.kv_cache == "static":
        raise UserError(
            "distributed.sharded is true, and policy.kv_cache is static: its kernels are captured once for all tokens,"
            " but the layers of a sharded network are gathered for every token. Set policy.kv_cache to growing."
        )


def _check_samplers(family: Family, sampling: SamplingConfig) -> None:
    kinds = family.kinds()
    for name, sampler in (("rollout", sampling.rollout), ("stock", sampling.stock)):
        for kind, keys, what in _KINDS:
            if kind not in kinds:
                remedy = "remove it, or set it to null where conf/base sets it"
                _refuse_settings(family, f"sampling.{name}", sampler, keys, f"no {what}; {remedy}")
            missing = [key for key in _FLOW_KEYS if getattr(sampler, key) is None]
            if kind == "flow" and kind in kinds and missing:
                raise UserError(f"sampling.{name} needs {', '.join(missing)}: {family.name} has denoising steps.")


def _refuse_settings(
    family: Family, where: str, settings: SamplerConfig | ControlConfig, keys: Sequence[str], why: str
) -> None:
    given = [key for key in keys if getattr(settings, key) is not None]
    if given:
        raise UserError(f"{where} sets {', '.join(given)}, but {family.name} has {why}.")


def _check_groups(family: Family, config: Parameters) -> None:
    sizes = {module: config.grpo_of(module).group_size for module in trained_modules(family, config.policy)}
    smallest = max(sizes.values()) if is_joint(family, config.policy) else min(sizes.values())
    if smallest < 2:
        raise UserError(
            f"A group needs at least 2 samples, got {sizes} (grpo.group_size, modules.NAME.group_size);"
            " only a joint rollout may have 1 for one of its modules."
        )


def _check_kl_correction(family: Family, config: Parameters) -> None:
    for name in trained_modules(family, config.policy):
        if config.grpo_of(name).kl_correction and family.modules[name].kind == "flow":
            raise UserError(
                f"kl_correction is for the KL of tokens, which is estimated from the samples; that of {name}'s"
                f" denoising steps is exact. Set it for another module (modules.NAME.kl_correction), or modules.{name}"
                ".kl_correction=false."
            )


def _check_decode_guidance(family: Family, config: Parameters) -> None:
    scale = config.policy.decode_guidance_scale
    trained = {family.modules[name].kind for name in trained_modules(family, config.policy)}
    if "tokens" in trained and "flow" in family.kinds() and not is_joint(family, config.policy):
        return
    if scale in (None, 1.0):  # As conf/base has it, which configurations of other families are differences from.
        return
    if "tokens" not in family.kinds() or "flow" not in family.kinds():
        why = f"{family.name} has no tokens that become pictures"
    elif is_joint(family, config.policy):
        why = "with policy.stages=joint the decoder's training draws the pictures"
    else:
        why = f"with policy.train={config.policy.train} no token module is trained"
    raise UserError(
        f"policy.decode_guidance_scale is {scale:g}, which changes nothing: {why}. Set it to null; guidance elsewhere"
        " is sampling.rollout.guidance_scale."
    )


def _check_window(family: Family, config: Parameters) -> None:
    flow, steps = config.policy.flow, config.sampling.rollout.steps or 0
    trained = trained_modules(family, config.policy)
    if not any(family.modules[name].kind == "flow" for name in trained) or _window_fits(config):
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


def _require_module(family: Family, name: str, where: str) -> None:
    if name not in family.modules:
        raise UserError(f"{where} names {name!r}.{nearest_hint(name, family.modules)} {_modules_of(family)}")


def _modules_of(family: Family) -> str:
    return f"The family {family.name} has the modules: {', '.join(family.modules)}."
