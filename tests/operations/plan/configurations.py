"""Parameters of the released configurations, read as ``kedro run --env`` reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from visual_grpo.config import Parameters, merged
from visual_grpo.starter.world_defaults import with_world

ROOT = Path(__file__).parents[3]
CONFIGURATIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "glm_image": ("glm_image", {}),
    "glm_image, decoder": ("glm_image", {"policy": {"train": "dit"}}),
    "sd3": ("sd3", {}),
    "qwen_image": ("qwen_image", {}),
    "flux": ("flux", {}),
    "flux_kontext": ("flux_kontext", {}),
    "qwen_image_edit_plus": ("qwen_image_edit_plus", {}),
    "z_image": ("z_image", {}),
    "flux2_klein": ("flux2_klein", {}),
    "wan": ("wan", {}),
    "wan, 9 frames": ("wan", {"data": {"frames": 9}}),
    "wan, 17 frames": ("wan", {"data": {"frames": 17}}),
    "wan_i2v": ("wan_i2v", {}),
    "ltx": ("ltx", {}),
    "ltx, 49 frames": ("ltx", {"data": {"frames": 49}, "grpo": {"micro_batch_size": 4}}),
    "qwen2_5_vl": ("qwen2_5_vl", {}),
    "qwen3_vl": ("qwen3_vl", {}),
    "qwen3_vl, 4B": ("qwen3_vl", {"model": {"path": "Qwen/Qwen3-VL-4B-Instruct"}}),
    "qwen2_5_vl, 3B": ("qwen2_5_vl", {"model": {"path": "Qwen/Qwen2.5-VL-3B-Instruct"}}),
}
"""Name in docs/experiments/planned_memory.md -> environment, and what is changed in it."""
_ROW = re.compile(r"^\| (\d+ GB|RTX \w+)[^|]* \| `(\w+)`([^|]*) \| (.+) \| ([\d.]+) GB \|$", re.MULTILINE)


def on_smaller_cards() -> dict[str, tuple[str, Mapping[str, Any], float]]:
    """Row of the table in docs/plan.md -> environment, changes with the card, and the peak in GB."""
    rows, given = {}, list[str]()
    for card, environment, part, cell, peak in _ROW.findall((ROOT / "docs/plan.md").read_text(encoding="utf-8")):
        before = given if cell.startswith("the same") else []
        own = "".join(re.findall("`([^`]+)`", cell.replace("` and `", ","))).split(",")
        given = [*before, *filter(None, own)]
        gpu = "RTX 4090" if card == "24 GB" else card
        tree: Any = OmegaConf.to_container(OmegaConf.from_dotlist([*given, f"plan.gpu={gpu}"]))
        rows[f"{environment}{part}, {card}"] = environment, tree, float(peak)
    return rows


def parameters_of(environment: str, changes: Mapping[str, Any]) -> Parameters:
    both = merged(tree_of("base"), tree_of(environment))
    return Parameters.model_validate(with_world(merged(both, changes), environment))


@cache
def tree_of(environment: str) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load((ROOT / f"conf/{environment}/parameters.yml").read_text())
    return tree
