"""The one place that turns a configuration into objects."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from visual_grpo.config import Dtype, ModelConfig, Module, Parameters, PolicyConfig, SamplerConfig
from visual_grpo.errors import UserError

if TYPE_CHECKING:
    from visual_grpo.grpo.trainer import GRPOTrainer, Trainer
    from visual_grpo.policies.glm_image import GlmImage
    from visual_grpo.policies.glm_image_ar import GlmImageArPolicy
    from visual_grpo.policies.glm_image_dit import GlmImageDitPolicy
    from visual_grpo.policies.qwen2_5_vl import QwenVl, QwenVlPolicy
    from visual_grpo.rewards.combine import RewardSet

ROLLOUT = SamplerConfig(temperature=1.0, top_p=1.0, top_k=0, steps=4, guidance_scale=1.5)
"""A few ODE steps are enough for a reward to tell samples apart; guidance as the plain pipeline has it."""
STOCK = SamplerConfig(steps=50, guidance_scale=1.5)


def check(config: Parameters) -> None:
    """Raises UserError where a reward, the device or the model's folder does not exist; loads no model."""
    from visual_grpo.pretrained import resolve_device

    for module in config.policy.modules:
        build_scorer(config, module)
    resolve_device(config.model.device)
    if config.model.path is None:
        return
    if config.policy.component == "vl":
        from visual_grpo.policies.qwen2_5_vl import check_qwen_path

        check_qwen_path(config.model.path)
    else:
        from visual_grpo.policies.pipeline import check_model_path

        check_model_path(config.model.path)


def build_model(config: Parameters, model: str, adapters: Path | None = None) -> GlmImage | QwenVl:
    """The ``model`` (folder or hub id), without any adapter or with the saved ones of ``policy.component``.

    Raises UserError where ``config.model.path`` asks for another model than the starter reported.
    """
    if config.model.path not in (None, model):
        raise UserError(
            f"model.path is {config.model.path}, but the starter was run with {model}."
            " Run it again with the same parameters: kedro run --pipeline=starter"
        )
    from visual_grpo.cpu import use_threads

    use_threads(config.model.threads)
    if config.policy.component == "vl":
        return _build_qwen(config, model, adapters)
    return _build_image_model(config, model, adapters)


def _build_qwen(config: Parameters, model: str, adapters: Path | None) -> QwenVl:
    from visual_grpo.policies.qwen2_5_vl import QwenVl, load_qwen

    qwen = QwenVl(*load_qwen(model, config.model), config.policy)
    if adapters is not None:
        qwen.load(adapters)
    return qwen


def _build_image_model(config: Parameters, model: str, adapters: Path | None) -> GlmImage:
    from visual_grpo.policies.glm_image import GlmImage
    from visual_grpo.policies.pipeline import load_pipeline

    pipeline = load_pipeline(model, config.model)
    image = GlmImage(pipeline, config.policy, (config.data.height, config.data.width))
    if adapters is not None:
        image.load(adapters, config.policy.modules)
    return image


def build_scorer(config: Parameters, module: Module | None = None) -> RewardSet:
    """The rewards with their weights for one module's training, or for judging what the component trains."""
    from visual_grpo.rewards.catalogue import build_reward_set

    return build_reward_set(config.rewards, config.weights(module))


def build_trainer(config: Parameters, model: GlmImage | QwenVl, scorer: RewardSet) -> Trainer:
    """The trainer of ``policy.component``, with fresh adapters on ``model``."""
    from visual_grpo.policies.glm_image import GlmImage

    if isinstance(model, GlmImage):
        return _image_trainer(config, model, scorer)
    model.attach(config.seed)
    return _module_trainer(config, _vl_policy(config, model), "vl", scorer)


def _vl_policy(config: Parameters, model: QwenVl) -> QwenVlPolicy:
    from visual_grpo.policies.qwen2_5_vl import QwenVlPolicy

    return QwenVlPolicy(model, config.sampling.rollout, kl_reference=config.grpo.kl_weight > 0)


def _image_trainer(config: Parameters, image: GlmImage, scorer: RewardSet) -> Trainer:
    from visual_grpo.grpo.two_stage import AlternatingTrainer

    modules = config.policy.modules
    image.attach(modules, config.seed)
    if config.policy.component == "both" and config.policy.both == "joint":
        return _joint_trainer(config, image, scorer)
    trainers: dict[str, GRPOTrainer[Any]] = {
        module: _module_trainer(config, _policy(config, image, module), module, scorer) for module in modules
    }
    if len(trainers) == 1:
        return trainers[modules[0]]
    return AlternatingTrainer(trainers, config.grpo.steps, config.seed)


def _joint_trainer(config: Parameters, image: GlmImage, scorer: RewardSet) -> Trainer:
    from visual_grpo.grpo.two_stage import JointTrainer
    from visual_grpo.policies.glm_image_both import GlmImageJointPolicy

    sizes = (config.grpo.group_size, config.grpo.of("dit").group_size)
    ar, dit = _ar_policy(config, image), _dit_policy(config, image)
    return JointTrainer(
        GlmImageJointPolicy(ar, dit),
        ("ar", _module_trainer(config, ar, "ar", scorer) if sizes[0] > 1 else None),
        ("dit", _module_trainer(config, dit, "dit", scorer) if sizes[1] > 1 else None),
        scorer,
        {"ar": config.weights("ar"), "dit": config.weights("dit")},
        steps=config.grpo.steps,
        prompts_per_step=config.grpo.prompts_per_step,
        sizes=sizes,
        seed=config.seed,
    )


def _module_trainer(config: Parameters, policy: Any, module: Module, scorer: RewardSet) -> GRPOTrainer[Any]:
    from visual_grpo.grpo.trainer import GRPOTrainer

    own = scorer.weighted(config.weights(module))
    return GRPOTrainer(policy, own, config.grpo.of(module), seed=config.seed, dtype=config.model.dtype, module=module)


def _policy(config: Parameters, image: GlmImage, module: Module) -> GlmImageArPolicy | GlmImageDitPolicy:
    return _ar_policy(config, image) if module == "ar" else _dit_policy(config, image)


def _ar_policy(config: Parameters, image: GlmImage) -> GlmImageArPolicy:
    from visual_grpo.policies.glm_image_ar import GlmImageArPolicy

    return GlmImageArPolicy(image, config.sampling.rollout, kl_reference=config.grpo.kl_weight > 0)


def _dit_policy(config: Parameters, image: GlmImage) -> GlmImageDitPolicy:
    from visual_grpo.policies.glm_image_dit import GlmImageDitPolicy

    return GlmImageDitPolicy(
        image, config.sampling.rollout, config.sampling.stock, kl_reference=config.grpo.of("dit").kl_weight > 0
    )


@overload
def load_policy(
    model: str,
    *,
    module: Literal["ar"] = "ar",
    size: tuple[int, int] = (1024, 1024),
    policy: PolicyConfig | None = None,
    rollout: SamplerConfig = ROLLOUT,
    kl_reference: bool = False,
    dtype: Dtype = "float32",
    device: str = "auto",
    seed: int = 0,
) -> GlmImageArPolicy: ...


@overload
def load_policy(
    model: str,
    *,
    module: Literal["dit"],
    size: tuple[int, int] = (1024, 1024),
    policy: PolicyConfig | None = None,
    rollout: SamplerConfig = ROLLOUT,
    kl_reference: bool = False,
    dtype: Dtype = "float32",
    device: str = "auto",
    seed: int = 0,
) -> GlmImageDitPolicy: ...


def load_policy(
    model: str,
    *,
    module: Module = "ar",
    size: tuple[int, int] = (1024, 1024),
    policy: PolicyConfig | None = None,
    rollout: SamplerConfig = ROLLOUT,
    kl_reference: bool = False,
    dtype: Dtype = "float32",
    device: str = "auto",
    seed: int = 0,
) -> GlmImageArPolicy | GlmImageDitPolicy:
    """One module of a GLM-Image with a fresh adapter, without any Kedro configuration.

    Args:
        model: folder or hub id of a GlmImagePipeline.
        module: ``ar``, the token generator, or ``dit``, the decoder.
        size: (height, width) in pixels, multiples of 32.
        rollout: how training samples are drawn; temperature sampling without truncation.
        kl_reference: needed where ``GRPOConfig.kl_weight`` is above 0.
    """
    from visual_grpo.policies.glm_image_ar import GlmImageArPolicy
    from visual_grpo.policies.glm_image_dit import GlmImageDitPolicy

    image = load_image_model(model, size=size, policy=policy, modules=(module,), dtype=dtype, device=device, seed=seed)
    if module == "ar":
        return GlmImageArPolicy(image, rollout, kl_reference=kl_reference)
    return GlmImageDitPolicy(image, rollout, STOCK, kl_reference=kl_reference)


def load_vl_policy(
    model: str,
    *,
    policy: PolicyConfig | None = None,
    rollout: SamplerConfig = ROLLOUT,
    kl_reference: bool = False,
    dtype: Dtype = "float32",
    device: str = "auto",
    seed: int = 0,
) -> QwenVlPolicy:
    """A Qwen2.5-VL (folder or hub id) with a fresh adapter, without any Kedro configuration; else as `load_policy`."""
    from visual_grpo.policies.qwen2_5_vl import QwenVl, QwenVlPolicy, load_qwen

    config = policy or PolicyConfig(component="vl")
    qwen = QwenVl(*load_qwen(model, ModelConfig(path=model, dtype=dtype, device=device)), config)
    qwen.attach(seed)
    return QwenVlPolicy(qwen, rollout, kl_reference=kl_reference)


def load_image_model(
    model: str,
    *,
    size: tuple[int, int] = (1024, 1024),
    policy: PolicyConfig | None = None,
    modules: Sequence[Module] = (),
    adapters: Path | None = None,
    dtype: Dtype = "float32",
    device: str = "auto",
    seed: int = 0,
) -> GlmImage:
    """A GLM-Image without any Kedro configuration.

    Args:
        model: folder or hub id of a GlmImagePipeline.
        size: (height, width) in pixels, multiples of 32.
        modules: which of ``ar`` and ``dit`` get an adapter.
        adapters: folder with saved adapters to sample from (``ar``, ``dit``), instead of fresh ones to train.
    """
    from visual_grpo.policies.glm_image import GlmImage
    from visual_grpo.policies.pipeline import load_pipeline

    pipeline = load_pipeline(model, ModelConfig(path=model, dtype=dtype, device=device))
    image = GlmImage(pipeline, policy or PolicyConfig(), size)
    if adapters is not None:
        image.load(adapters, modules)
    else:
        image.attach(modules, seed)
    return image
