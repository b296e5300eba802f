"""Loads pretrained models of transformers: safetensors only, in evaluation mode, each once in a process."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch

from visual_grpo.errors import UserError
from visual_grpo.rewards.learned.compute import Compute
from visual_grpo.rewards.learned.origin import Origin
from visual_grpo.third_party_output import hidden_progress_bars

_loaded: WeakValueDictionary[tuple[object, ...], Any] = WeakValueDictionary()
"""Models that a reward still uses: two rewards over one model hold its weights once."""


def load_model(origin: Origin, compute: Compute, model_class: str) -> Any:
    """The model in ``origin``, frozen, on the device.

    Args:
        model_class: its name in transformers.

    Raises:
        UserError: files are missing or damaged, or they are another model's.
    """
    folder = origin.folder()
    key = (folder.resolve(), model_class, compute.dtype, str(compute.device))
    model = _loaded.get(key)
    if model is None:
        # Layers are drawn before they are filled; that must not move the generator that others draw from.
        with torch.random.fork_rng():
            model = _load(origin, folder, model_class, compute)
        _loaded[key] = model
    return model


def load_processor(origin: Origin, name: str) -> Any:
    """An image processor, tokenizer or both, by its name in transformers. Raises UserError."""
    import transformers

    folder = origin.folder()
    processor_class = getattr(transformers, name)
    try:
        return processor_class.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{origin.reward}: the {name} in {folder} cannot be loaded: {error}. Save or download it again"
        ) from error


def _load(origin: Origin, folder: Path, model_class: str, compute: Compute) -> Any:
    import transformers
    from safetensors import SafetensorError

    with hidden_progress_bars():
        try:
            model, report = getattr(transformers, model_class).from_pretrained(
                folder, dtype=compute.dtype, use_safetensors=True, local_files_only=True, output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:  # RuntimeError: weights of other shapes.
            raise UserError(
                f"{origin.reward}: the {model_class} in {folder} cannot be loaded: {error}\nIts files are damaged or do"
                " not belong together. Save or download it again"
            ) from error
    if missing := sorted(report["missing_keys"]):  # They would be drawn at random.
        raise UserError(
            f"{origin.reward}: {folder} is no complete {model_class}: it lacks {len(missing)} of its weights, for"
            f" example {missing[0]}. Save or download it again"
        )
    return model.eval().requires_grad_(False).to(compute.device)
