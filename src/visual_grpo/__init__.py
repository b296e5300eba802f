"""Post-train visual models with Group Relative Policy Optimization, reproducibly.

The core without Kedro; every name is loaded when it is first used, so that importing the package
stays light.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "GRPOConfig": "config",
    "LoraParams": "config",
    "PolicyConfig": "config",
    "SamplerConfig": "config",
    "GRPOTrainer": "grpo.trainer",
    "group_advantages": "grpo.losses",
    "gdpo_advantages": "grpo.losses",
    "clipped_surrogate": "grpo.losses",
    "importance_ratio": "grpo.losses",
    "k3_kl": "grpo.losses",
    "load_policy": "training.components",
    "load_model": "training.components",
    "TextSample": "common.types",
    "Family": "models.family",
    "Module": "models.module",
    "ModelSettings": "models.module",
    "Model": "models.model",
    "FlowModel": "models.flow.interface",
    "FlowPolicy": "models.flow.policy",
    "Schedule": "models.flow.interface",
    "TokenPolicy": "models.tokens.policy",
    "FlowConfig": "config",
    "RewardSet": "rewards.combine",
    "Needs": "common.types",
    "PromptRecord": "common.types",
    "RewardOutput": "common.types",
    "Rollout": "common.types",
    "StepMetrics": "common.types",
    "UserError": "common.errors",
    "paired_difference": "evaluation.paired",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'visual_grpo' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"visual_grpo.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
