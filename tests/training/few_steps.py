"""A training of a few steps: its parameters, records and reward. Imports no library that takes seconds."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.conftest import SIZE
from visual_grpo.common.types import PromptRecord
from visual_grpo.config import Parameters
from visual_grpo.models.run_spec import RunSpec, resolve
from visual_grpo.starter.world_defaults import with_world

STEPS = 6
RECORDS = [PromptRecord(id=f"r{i}", prompt=f"a thing number {i}") for i in range(9)]


def parameters(folder: Path, **changes: Any) -> Parameters:
    tree: dict[str, Any] = {
        "seed": 3,
        "data": {"path": "unused", "height": SIZE[0], "width": SIZE[1]},
        "starter": {"world": "shapes", "records_per_prompt": 1, "vae_steps": 1, "dit_steps": 1, "ar_steps": 1},
        "model": {"path": "unused", "device": "cpu", "threads": 1},
        "policy": {"train": "ar", "signal_check": {"rollouts": 0}},
        "sampling": {
            "rollout": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "steps": 1, "guidance_scale": 1.0},
            "eval": {"steps": 1, "guidance_scale": 1.5},
        },
        "rewards": {"brightness": {"function": "tests.training.few_steps:brightness"}},
        "grpo": {
            "steps": STEPS,
            "prompts_per_step": 2,
            "group_size": 3,
            "updates_per_rollout": 2,
            "learning_rate": 1e-3,
            "kl_weight": 0.01,
            "schedule": "cosine",
        },
        "evaluation": {"every": 2, "prompts": 2, "images_per_prompt": 1},
        "tracking": {"checkpoint_every": 2, "images_every": 0, "checkpoints": str(folder / "checkpoints")},
    }
    for key, value in changes.items():
        if isinstance(value, dict):
            tree[key] = tree.get(key, {}) | value
        else:
            tree[key] = value
    return Parameters.model_validate(with_world(tree))


def brightness(prompts: Any, images: Any) -> list[float]:
    """Draws a random number as a careless reward does: the generators must be in the checkpoint."""
    return [float(image.float().mean()) / 255 + 1e-3 * random.random() for image in images]


def resolved(config: Parameters, model: Path | str) -> RunSpec:
    """Resolves the parameters for the model in a folder."""
    return resolve(config.model_copy(update={"model": config.model.model_copy(update={"path": str(model)})}))
