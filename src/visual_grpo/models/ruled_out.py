"""Refusals of parameters that a model's family, or a different parameter, rules out."""

from __future__ import annotations

from collections.abc import Iterator

from visual_grpo.common.decisions import Likelihoods, Matches
from visual_grpo.config import FlowConfig, ModelConfig, Parameters, PolicyConfig, SamplingConfig
from visual_grpo.config.policy import FlowSettings, TokenSettings
from visual_grpo.grpo.losses import LOSSES, is_forward_process
from visual_grpo.grpo.policy_loss import conflicts
from visual_grpo.models.family import Family
from visual_grpo.models.module import Kind

SETTINGS = {"tokens": TokenSettings.model_fields, "flow": FlowSettings.model_fields}
"""Kind of module -> the settings of a sampler that only it has."""
_GENERATES = {"tokens": "tokens", "flow": "denoising steps"}


def ruled_out(family: Family, config: Parameters, modules: tuple[str, ...]) -> Iterator[str]:
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
    yield from conflicts(grpo, name, config.model.dtype)
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
        for kind, keys in SETTINGS.items():
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
    if not window_fits(flow, steps):
        yield (
            f"policy.flow: the window (window_start {flow.window_start}, window_steps {flow.window_steps}) must end"
            f" before the last of sampling.rollout.steps = {steps} denoising steps, which has no variance:"
            f" at most {steps - 1} steps, 0 to {steps - 2}."
        )


def window_fits(flow: FlowConfig, steps: int) -> bool:
    return (flow.window_start or 0) + (flow.window_steps or 1) <= steps - 1
