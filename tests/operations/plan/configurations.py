"""Parameters of the released configurations, read as ``kedro run --env`` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from visual_grpo.config import Parameters, merged
from visual_grpo.starter.world_defaults import with_world

ROOT = Path(__file__).parents[3]
_SMALL = {"rollout_batch": 8, "denoise_batch": 2}
_OFFLOADED = {"model": {"offload": "phases"}}
_SMALL_LORA = {"policy": {"lora": {"rank": 32, "alpha": 64}}}
CONFIGURATIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "glm_image": ("glm_image", {}),
    "glm_image, decoder": ("glm_image", {"policy": {"train": "dit"}}),
    "sd3": ("sd3", {}),
    "qwen_image": ("qwen_image", {}),
    "glm_image, 24 GB": ("glm_image", {**_OFFLOADED, "policy": _SMALL, "plan": {"gpu": "RTX 4090"}}),
    "glm_image, decoder, 24 GB": (
        "glm_image",
        {**_OFFLOADED, "policy": {**_SMALL, "train": "dit"}, "plan": {"gpu": "RTX 4090"}},
    ),
    "qwen_image, 48 GB": (
        "qwen_image",
        {**_OFFLOADED, **_SMALL_LORA, "plan": {"gpu": "RTX A6000"}},
    ),
    "glm_image, 4 bits, 24 GB": (
        "glm_image",
        {"model": {"base_weights": "4bit"}, "policy": _SMALL, "plan": {"gpu": "RTX 4090"}},
    ),
    "qwen_image, 4 bits, 24 GB": (
        "qwen_image",
        {"model": {"base_weights": "4bit", "offload": "phases"}, **_SMALL_LORA, "plan": {"gpu": "RTX 4090"}},
    ),
    "flux": ("flux", {}),
    "flux, 4 bits, 24 GB": (
        "flux",
        {"model": {"base_weights": "4bit", "offload": "phases"}, "plan": {"gpu": "L4"}},
    ),
    "flux_kontext": ("flux_kontext", {}),
    "flux_kontext, 4 bits, 24 GB": (
        "flux_kontext",
        {"model": {"base_weights": "4bit", "offload": "phases"}, "plan": {"gpu": "L4"}},
    ),
    "qwen_image_edit_plus": ("qwen_image_edit_plus", {}),
    "z_image": ("z_image", {}),
    "z_image, L4": ("z_image", {**_OFFLOADED, "plan": {"gpu": "L4"}}),
    "flux2_klein": ("flux2_klein", {}),
    "wan": ("wan", {}),
    "wan, 9 frames": ("wan", {"data": {"frames": 9}}),
    "wan, 17 frames": ("wan", {"data": {"frames": 17}}),
    "wan_i2v": ("wan_i2v", {}),
    "wan_i2v, 4 bits, 24 GB": ("wan_i2v", {"model": {"base_weights": "4bit"}, "plan": {"gpu": "RTX 4090"}}),
    "ltx": ("ltx", {}),
    "ltx, 49 frames": ("ltx", {"data": {"frames": 49}, "grpo": {"micro_batch_size": 4}}),
    "qwen2_5_vl": ("qwen2_5_vl", {}),
    "qwen3_vl": ("qwen3_vl", {}),
    "qwen3_vl, 4B": ("qwen3_vl", {"model": {"path": "Qwen/Qwen3-VL-4B-Instruct"}}),
    "qwen2_5_vl, 3B": ("qwen2_5_vl", {"model": {"path": "Qwen/Qwen2.5-VL-3B-Instruct"}}),
}
"""Name in docs/plan.md and docs/experiments/planned_memory.md -> environment, and what is changed in it."""


def parameters_of(environment: str, changes: Mapping[str, Any]) -> Parameters:
    both = merged(tree_of("base"), tree_of(environment))
    return Parameters.model_validate(with_world(merged(both, changes), environment))


@cache
def tree_of(environment: str) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load((ROOT / f"conf/{environment}/parameters.yml").read_text())
    return tree
