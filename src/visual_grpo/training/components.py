"""Turns a configuration into objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from visual_grpo.adapter_folder import check_base, check_lora, check_weights, modules_of, read_facts
from visual_grpo.common.digests import content_digest, digest_once
from visual_grpo.common.errors import UserError
from visual_grpo.common.files import settled
from visual_grpo.config import Dtype, ModelConfig, PolicyConfig, SamplerConfig
from visual_grpo.config.validation import validate
from visual_grpo.grpo.trainer import GRPOTrainer
from visual_grpo.grpo.two_stage import AlternatingTrainer, JointTrainer
from visual_grpo.models.execution import attention_of, set_execution
from visual_grpo.models.family import find_family, is_own
from visual_grpo.models.family_check import check_before_training
from visual_grpo.models.lora_files import read_lora, require_merged, start_from
from visual_grpo.models.lora_fit import require_startable
from visual_grpo.models.lora_lookup import merged_lora
from visual_grpo.models.module import ModelSettings
from visual_grpo.models.quantized import require_quantized
from visual_grpo.models.run_spec import options_of
from visual_grpo.rewards.build import build_reward_set

if TYPE_CHECKING:
    from visual_grpo.grpo.distributed.rollouts import RankZeroScorer
    from visual_grpo.grpo.two_stage import Trainer
    from visual_grpo.models.family import Family
    from visual_grpo.models.lora import AdapterPolicy
    from visual_grpo.models.model import Model
    from visual_grpo.models.run_spec import RunSpec
    from visual_grpo.rewards.combine import RewardSet

ROLLOUT = {"tokens": {"temperature": 1.0, "top_p": 1.0, "top_k": 0}, "flow": {"steps": 4, "guidance_scale": 1.5}}
"""Training samples of `load_policy`: a few denoising steps are enough for a reward to tell samples apart."""
EVAL_SAMPLER = {"tokens": {}, "flow": {"steps": 50, "guidance_scale": 1.5}}


def check_unchanged(base_model: Mapping[str, Any], spec: RunSpec) -> None:
    """Raises UserError if the base model is not the one of ``model.path``, or its files are not those that the starter
    pipeline recorded or made."""
    path, model, before = spec.config.model.path, base_model["model"], base_model["content"]
    if path != model and (before is None or content_digest(path) != before):
        raise UserError(f"model.path is {path}, but the starter was run with {model}. Run it again.", remedy="starter")
    commit, now = base_model.get("commit"), spec.config.model.revision
    if commit is not None and commit != now:
        raise UserError(
            f"{model} has moved on the hub since the starter was run: it was at commit {commit}, and is at {now}. To go"
            f" on with what was there, set model.revision={commit}; for the new one, run the starter again.",
            remedy="starter",
        )
    if (merged := base_model.get("lora")) != (present := lora_digest(spec.config.model)):
        had, has = (f"the LoRA with the sha256 {each[:12]}" if each else "no LoRA" for each in (merged, present))
        raise UserError(
            f"model.lora: the base model has {has} merged into it, and had {had} when the starter was run. Run it"
            " again.",
            remedy="starter",
        )
    if before is not None and content_digest(model) != before:
        raise UserError(
            f"the base model {model} has changed since the starter pipeline ran: a file was edited, added or"
            " removed. Earlier samples and adapters belong to the other model. Put the files back, or (if the"
            " starter made it) delete the folder and make it again.",
            remedy="starter",
        )


def lora_digest(model: ModelConfig) -> str | None:
    """Returns the sha256 of the LoRA that is merged into the base model; None without one."""
    return None if model.lora is None else digest_once(merged_lora(model.lora))


def _check_adapters(folder: Path, model: ModelConfig) -> None:
    """Raises UserError where the adapters in ``folder`` have changed since their training, or had a different base."""
    check_weights(folder)
    check_base(folder, model.path)
    check_lora(folder, lora_digest(model))


def build_model(spec: RunSpec, adapters: Path | None = None, *, check_own_family: bool = False) -> Model:
    """Builds the base model, without any adapter or with the saved ones of the trained modules.

    Raises UserError where its files are not those that the adapters were trained on, or, with ``check_own_family``,
    where a family that is not built in generates different latents than its pipeline.
    """
    config, model = spec.config, spec.config.model.path
    if config.model_is_pretrained and not settled(Path(model)).is_dir():
        raise UserError(f"The base model {model} does not exist yet.", remedy="starter")
    torch.set_num_threads(config.model.threads)
    loaded = spec.family.load(model, config.model)
    built = spec.build(loaded)
    require_merged(built.adapters.networks, config.model.lora)
    require_quantized(built.adapters.networks, config.model.base_weights)
    set_execution(built.adapters.networks, built.modules, config.model)
    if check_own_family and is_own(config.model.family):
        scale, task = spec.rollout.guidance_scale or 1, config.data.task
        check_before_training(spec.family, loaded, built, spec.settings, task, scale, config.model.dtype)
    if adapters is not None:
        _check_adapters(adapters, config.model)
        built.adapters.load(adapters, spec.modules)
    return built


def build_generator(spec: RunSpec, adapters: Path | None, sampler: str) -> Model:
    """Builds the model for samples alone; for the sampler ``rollout``, in the size of training samples."""
    built = build_model(spec, adapters)
    return built if sampler == "eval" else built.rollouts or built


def build_scorer(spec: RunSpec, modules: Sequence[str] | None = None) -> RewardSet:
    """Builds the rewards, with their weights where ``modules`` (None = all that are trained) are judged together."""
    return build_reward_set(spec.config.rewards, spec.config.weights(spec.modules if modules is None else modules))


def build_trainer(
    spec: RunSpec, model: Model, scorer: RewardSet | RankZeroScorer, *, start: Path | None = None
) -> Trainer:
    """Builds the trainer of ``policy.train``'s modules, which all ranks of the command share.

    Their adapters on ``model`` are fresh ones, or have the weights of those in the folder ``start``, or the effect of
    the LoRA in that file. Judges score no rollout.
    """
    config, scorer = spec.config, scorer.without_judges()
    model.adapters.attach({module: config.lora_of(module) for module in spec.modules}, config.training_seed)
    if start is not None and start.is_file():
        start_from(model.adapters[spec.modules[0]], read_lora(spec.family.saved_as[0], start))
    elif start is not None:
        model.adapters.start_from(start)
    trainers: dict[str, GRPOTrainer[Any]] = {}
    for module in spec.modules:
        grpo = config.grpo_of(module)
        trainers[module] = GRPOTrainer(
            model.policy(
                module,
                rollout=spec.rollout,
                evaluation=config.sampling.eval,
                kl_reference=grpo.kl_weight > 0,
                forward_process=spec.forward_process,
            ),
            scorer.weighted(config.weights([module])),
            grpo,
            seed=config.training_seed,
            module=module,
        )
    if spec.joint:
        return JointTrainer(
            model.joint_policy(*(trainer.policy for trainer in trainers.values())),
            trainers,
            scorer,
            {module: config.weights([module]) for module in trainers},
            steps=config.grpo.steps,
            prompts_per_step=config.grpo.prompts_per_step,
            seed=config.training_seed,
        )
    if len(trainers) == 1:
        return trainers[spec.modules[0]]
    return AlternatingTrainer(trainers, config.grpo.steps, config.training_seed)


def check_start(spec: RunSpec, start: Path) -> None:
    """Raises UserError where the modules cannot start from ``start``, a LoRA file or a folder of adapters: it is
    damaged, of a different base model, lacks a module, or has a different LoRA on one."""
    if start.is_file():
        require_startable(spec, start)
        return
    _check_adapters(start, spec.config.model)
    trained, before = modules_of(start), validate(read_facts(start)["parameters"])
    for module in spec.modules:
        if module not in trained:
            raise UserError(
                f"train.start: {start} has adapters of {', '.join(trained)}, but {module} is to be trained."
            )
        was, now = before.lora_of(module), spec.config.lora_of(module)
        if was != now:
            raise UserError(
                f"train.start: the LoRA of {module} in {start} has {was}, this training has {now}. Give both the same"
                f" policy.lora (or modules.{module}.lora), or start from the base model: train.start=base"
            )


def load_model(
    model: Path | str,
    *,
    size: tuple[int, int] = (1024, 1024),
    frames: int | None = None,
    fps: float = 16.0,
    policy: PolicyConfig | None = None,
    train: str | Sequence[str] = (),
    adapters: Path | str | None = None,
    family: str = "auto",
    revision: str | None = None,
    lora: Path | str | None = None,
    options: dict[str, object] | None = None,
    dtype: Dtype = "float32",
    base_weights: Literal["full", "8bit", "4bit"] = "full",
    device: str = "auto",
    attention: str | dict[str, str] | None = None,
    compile: bool = False,  # noqa: A002 - as the parameter is called.
    seed: int = 0,
) -> Model:
    """A model of any family without any Kedro configuration.

    Args:
        model: folder or hub id, whose family ``auto`` recognises.
        size: (height, width) in pixels, multiples of 32.
        frames: of a video, and how many a second (``fps``, which LTX-Video reads); None = images.
        revision: branch, tag or commit of a hub id; None = main.
        lora: a LoRA that is merged into the model, as the parameter ``model.lora`` names it; None = none.
        train: the module, or modules, that get an adapter.
        adapters: folder with the saved adapters of these modules (by default of all that it has) to sample with,
            instead of fresh ones to train; also one that a policy's ``save_adapter`` wrote.
    """
    if any(side < 32 or side % 32 for side in size):
        near = tuple(max(32, round(side / 32) * 32) for side in size)
        raise UserError(f"size is {size}; expected (height, width) in multiples of 32 pixels, such as {near}.")
    config = policy or PolicyConfig()
    model_config = ModelConfig(
        path=str(model),
        revision=revision,
        lora=None if lora is None else str(lora),
        dtype=dtype,
        base_weights=base_weights,
        device=device,
        attention=attention,
        compile=compile,
        options=options or {},
    )
    model_family = find_family(family, model_config.path, revision)
    model_family.check_frames(frames)
    modules = (train,) if isinstance(train, str) else tuple(train)
    if unknown := [name for name in modules if name not in model_family.modules]:
        raise UserError(f"{model_family.name} has no module {unknown[0]!r}; it has {', '.join(model_family.modules)}")
    settings = ModelSettings(
        size=size, frames=frames, fps=fps, policy=config, options=options_of(model_family, model_config.options)
    )
    attention_of(model_config, model_family.modules)
    if adapters is not None:
        _check_adapters(Path(adapters), model_config)
    built = model_family.build(model_family.load(model_config.path, model_config), settings)
    require_merged(built.adapters.networks, model_config.lora)
    require_quantized(built.adapters.networks, base_weights)
    set_execution(built.adapters.networks, built.modules, model_config)
    if adapters is not None:
        built.adapters.load(Path(adapters), modules)
    else:
        built.adapters.attach(dict.fromkeys(modules, config.lora), seed)
    return built


def load_policy(
    model: Path | str,
    *,
    module: str | None = None,
    size: tuple[int, int] = (1024, 1024),
    frames: int | None = None,
    fps: float = 16.0,
    policy: PolicyConfig | None = None,
    rollout: SamplerConfig | None = None,
    kl_reference: bool = False,
    forward_process: bool = False,
    family: str = "auto",
    revision: str | None = None,
    lora: Path | str | None = None,
    options: dict[str, object] | None = None,
    dtype: Dtype = "float32",
    device: str = "auto",
) -> AdapterPolicy[Any]:
    """Loads one module of a saved model with a fresh adapter, without any Kedro configuration.

    Args:
        model: folder or hub id of a model of any family.
        module: ``ar`` or ``dit`` of GLM-Image, ``dit`` of the other flow models, ``vl`` of Qwen2.5-VL; None = first.
        size: (height, width) in pixels, multiples of 32.
        frames: of a video, and how many a second (``fps``, which LTX-Video reads); None = images.
        revision: branch, tag or commit of a hub id; None = main.
        lora: a LoRA that is merged into the model, as the parameter ``model.lora`` names it; None = none.
        rollout: how training samples are generated; None = 4 denoising steps at guidance 1.5, temperature 1.
        kl_reference: needed where ``GRPOConfig.kl_weight`` is above 0.
        forward_process: needed where ``GRPOConfig.loss`` is nft or awm.
    """
    model_family = find_family(family, ModelConfig(path=str(model)).path, revision)
    name = module or next(iter(model_family.modules))
    built = load_model(
        model,
        size=size,
        frames=frames,
        fps=fps,
        policy=policy,
        train=name,
        family=family,
        revision=revision,
        lora=lora,
        options=options,
        dtype=dtype,
        device=device,
    )
    return built.policy(
        name,
        rollout=rollout or _sampler(model_family, ROLLOUT),
        evaluation=_sampler(model_family, EVAL_SAMPLER),
        kl_reference=kl_reference,
        forward_process=forward_process,
    )


def _sampler(family: Family, settings: dict[str, dict[str, Any]]) -> SamplerConfig:
    return SamplerConfig(**{key: value for kind in family.kinds() for key, value in settings[kind].items()})
