"""The model that is planned for, without weights: a released one, one saved in a folder, or the starter's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from visual_grpo import components
from visual_grpo.config import Parameters
from visual_grpo.errors import UserError, nearest_hint
from visual_grpo.hardware.quantised import quantise, require_quantised
from visual_grpo.hardware.turns import take_turns
from visual_grpo.importing import load_attribute
from visual_grpo.plan.saved import load_without_weights
from visual_grpo.plan.small import build_small
from visual_grpo.policies.families import find_family
from visual_grpo.policies.family import Family, Model, ModelSettings
from visual_grpo.policies.family_settings import Plan, make_plan


@dataclass(frozen=True, kw_only=True)
class Released:
    """A model whose sizes are written down here."""

    family: str
    build: str
    """``module:function`` of this package: (hub id, dtype) -> what the family's ``load`` gives."""


RELEASED = {
    "zai-org/GLM-Image": Released(family="glm_image", build="glm_image:build"),
    "stabilityai/stable-diffusion-3.5-medium": Released(family="sd3", build="sd3:build"),
    "Qwen/Qwen-Image": Released(family="qwen_image", build="qwen_image:build"),
    "Qwen/Qwen2.5-VL-3B-Instruct": Released(family="qwen2_5_vl", build="qwen2_5_vl:build"),
    "Qwen/Qwen2.5-VL-7B-Instruct": Released(family="qwen2_5_vl", build="qwen2_5_vl:build"),
}


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    plan: Plan
    model: Model
    networks: dict[str, torch.nn.Module]
    """Every network by the name of its part, the frozen ones too."""
    source: str
    """Where the sizes come from, in words."""


def planned_model(config: Parameters) -> PlannedModel:
    """Raises UserError for a hub id whose sizes are not known here."""
    return of_loaded(config, *_loaded(config))


def of_loaded(config: Parameters, family: Family, loaded: Any, source: str) -> PlannedModel:
    """``loaded``: what the family's ``load`` gives, with or without weights."""
    plan = make_plan(family, config)
    settings = ModelSettings(size=(config.data.height, config.data.width), policy=config.policy, options=plan.options)
    networks = _networks(loaded)
    _quantise(networks, config)
    if config.model.offload == "phases":
        take_turns(networks, torch.device("meta"))
    model = family.build(loaded, settings)
    require_quantised(model.adapters.networks, config.model.base_weights)
    return PlannedModel(plan=plan, model=model, networks=networks, source=source)


def build_released(path: str, dtype: torch.dtype) -> Any:
    """One of `RELEASED`, as its family's ``load`` gives it."""
    return load_attribute(f"visual_grpo.plan.released.{RELEASED[path].build}", "model.path")(path, dtype)


def _loaded(config: Parameters) -> tuple[Family, Any, str]:
    path = config.model.path
    if path in RELEASED and not Path(path).exists():
        loaded = build_released(path, getattr(torch, config.model.dtype))
        return find_family(RELEASED[path].family), loaded, f"the published sizes of {path}"
    folder = path or config.starter.model
    if Path(folder).is_dir():
        family = find_family(config.model.family, folder)
        return family, load_without_weights(family, folder, config.model), f"the configuration files in {folder}"
    if path is None:
        family = components.family_of(config)
        return family, build_small(family.name, config), "the starter, which would pretrain it"
    raise UserError(
        f"model.path is {path}, whose sizes are not known without the model.{nearest_hint(path, RELEASED)}"
        f" Known: {', '.join(RELEASED)}. Or name the folder of a downloaded model: its configuration files are enough."
    )


def _quantise(networks: dict[str, torch.nn.Module], config: Parameters) -> None:
    """As a family's ``load`` does with weights that have values."""
    chosen = {name: network for name, network in networks.items() if name != "vae"}
    device = next(parameter.device for network in chosen.values() for parameter in network.parameters())
    quantise(chosen, config.model.base_weights, device, kept=device)


def _networks(loaded: Any) -> dict[str, torch.nn.Module]:
    parts = loaded.components if hasattr(loaded, "components") else {"model": loaded[0]}
    return {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
