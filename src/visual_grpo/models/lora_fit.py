"""Refuses, before any weights are loaded, a LoRA file that does not fit the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch

from visual_grpo.models.loading import loading
from visual_grpo.models.lora_files import read_lora, require_fit, require_layers
from visual_grpo.models.run_spec import RunSpec
from visual_grpo.models.without_weights import frozen


def require_startable(spec: RunSpec, file: Path) -> None:
    """Raises UserError where the training of ``spec`` cannot start from a LoRA file."""
    lora, module = read_lora(spec.family.saved_as[0], file), spec.modules[0]
    parts = spec.family.modules[module]
    lora_params = spec.config.lora_of(module)
    require_fit(parts.adapter.attach(_transformer(spec), lora_params, parts.targets, 0), lora)


def require_mergeable(spec: RunSpec, file: Path) -> None:
    """Raises UserError where a LoRA file cannot be merged into the model of ``spec``."""
    lora = read_lora(spec.family.saved_as[0], file)
    require_layers(_transformer(spec), lora)


def _transformer(spec: RunSpec) -> Any:
    """Returns the transformer of the model's pipeline without weights."""
    path, revision = spec.config.model.path, spec.config.model.revision
    with loading(path):
        described = diffusers.DiffusionPipeline.load_config(path, revision=revision)
        kind = getattr(diffusers, described["transformer"][1])
        sizes = kind.load_config(path, subfolder="transformer", revision=revision)
    return frozen(lambda: kind.from_config(sizes), torch.float32)
