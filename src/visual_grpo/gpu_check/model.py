"""The model that is checked: a saved one where it is on this machine, else one of its size with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from visual_grpo import components
from visual_grpo.command import again
from visual_grpo.config import Parameters
from visual_grpo.errors import UserError, nearest_hint
from visual_grpo.plan.models import RELEASED, build_released
from visual_grpo.plan.released.weightless import with_values_on
from visual_grpo.policies.families import find_family
from visual_grpo.policies.family import Family


def check_model(config: Parameters, device: torch.device) -> tuple[Family, Any, str]:
    """Family, what its ``load`` gives, and where the weights come from in words; downloads nothing.

    Raises UserError for a model that is neither here nor of a known size.
    """
    path = config.model.path or config.starter.model
    if Path(path).is_dir() or _is_downloaded(path):
        family = components.family_of(config, path)
        return family, family.load(path, config.model), f"the weights of {path}"
    if config.model.path is None:
        raise UserError(f"The starter's model {path} is not there yet. Make it first: {again('starter')}")
    if path not in RELEASED:
        raise UserError(
            f"model.path is {path}, which is not on this machine.{nearest_hint(path, RELEASED)} Expected a folder, the"
            f" hub id of a model that was downloaded before, or one whose size is known: {', '.join(RELEASED)}."
        )
    with with_values_on(str(device)):
        loaded = build_released(path, getattr(torch, config.model.dtype))
    return find_family(RELEASED[path].family), loaded, f"random weights of the size of {path}, which is not downloaded"


def _is_downloaded(path: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    from visual_grpo.policies.loading import MODEL_FILE, PIPELINE_FILE

    try:
        return any(isinstance(try_to_load_from_cache(path, file), str) for file in (PIPELINE_FILE, MODEL_FILE))
    except HFValidationError:
        return False
