"""The one place that turns a configuration into objects."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from visual_grpo.config import Dtype, ModelConfig, Parameters, PolicyConfig, SamplerConfig
from visual_grpo.errors import UserError

if TYPE_CHECKING:
    from visual_grpo.grpo.trainer import GRPOTrainer
    from visual_grpo.policies.glm_image_ar import GlmImageArPolicy
    from visual_grpo.policies.token_model import TokenTrajectory
    from visual_grpo.rewards.combine import RewardSet

ROLLOUT = SamplerConfig(temperature=1.0, top_p=1.0, top_k=0, steps=4, guidance_scale=1.0)
"""A few ODE steps without guidance are enough for a reward to tell samples apart."""


def check(config: Parameters) -> None:
    """Raises UserError where a reward, the device or the model's folder does not exist; loads no model."""
    from visual_grpo.policies.glm_image import check_model_path, resolve_device

    build_scorer(config)
    resolve_device(config.model.device)
    if config.model.path is not None:
        check_model_path(config.model.path)


def build_policy(config: Parameters, model: str, adapter: Path | None = None) -> GlmImageArPolicy:
    """The policy of ``config`` on the pipeline ``model`` (folder or hub id).

    With ``adapter`` the saved one, for sampling; else a fresh LoRA, which changes nothing until trained.
    Raises UserError where ``config.model.path`` asks for another model than the starter reported.
    """
    if config.model.path not in (None, model):
        raise UserError(
            f"model.path is {config.model.path}, but the starter was run with {model}."
            " Run it again with the same parameters: kedro run --pipeline=starter"
        )
    import torch

    from visual_grpo.policies.glm_image import load_pipeline
    from visual_grpo.policies.glm_image_ar import GlmImageArPolicy

    torch.set_num_threads(config.model.threads)
    return GlmImageArPolicy(
        load_pipeline(model, config.model),
        config.policy,
        config.sampling.rollout,
        (config.data.height, config.data.width),
        kl_reference=config.grpo.kl_weight > 0,
        adapter=adapter,
        seed=config.seed,
    )


def build_scorer(config: Parameters) -> RewardSet:
    """The weighted rewards of ``config``."""
    from visual_grpo.rewards.catalogue import build_reward_set

    return build_reward_set(config.rewards)


def build_trainer(config: Parameters, policy: GlmImageArPolicy, scorer: RewardSet) -> GRPOTrainer[TokenTrajectory]:
    """The trainer of ``config`` for ``policy`` and ``scorer``."""
    from visual_grpo.grpo.trainer import GRPOTrainer

    return GRPOTrainer(policy, scorer, config.grpo, seed=config.seed, dtype=config.model.dtype)


def load_policy(
    model: str,
    *,
    size: tuple[int, int] = (1024, 1024),
    policy: PolicyConfig | None = None,
    rollout: SamplerConfig = ROLLOUT,
    kl_reference: bool = False,
    adapter: Path | None = None,
    dtype: Dtype = "float32",
    device: str = "auto",
    seed: int = 0,
) -> GlmImageArPolicy:
    """A GLM-Image AR policy without any Kedro configuration.

    Args:
        model: folder or hub id of a GlmImagePipeline.
        size: (height, width) in pixels, multiples of 32.
        rollout: how training samples are drawn; temperature sampling without truncation.
        kl_reference: needed where ``GRPOConfig.kl_weight`` is above 0.
        adapter: a saved adapter to sample from, instead of a fresh one to train.
    """
    from visual_grpo.policies.glm_image import load_pipeline
    from visual_grpo.policies.glm_image_ar import GlmImageArPolicy

    pipeline = load_pipeline(model, ModelConfig(path=model, dtype=dtype, device=device))
    return GlmImageArPolicy(
        pipeline, policy or PolicyConfig(), rollout, size, kl_reference=kl_reference, adapter=adapter, seed=seed
    )
