"""Weights in a single file. Of what torch saved, tensors are read and nothing else: a file cannot run code."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import Tensor

from visual_grpo.errors import UserError


def read_weights(reward: str, file: Path) -> dict[str, Tensor]:
    """Tensors by name, on the CPU, of a ``.safetensors`` file or one that ``torch.save`` wrote.

    Raises UserError where the file is missing, damaged or holds anything but tensors.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError, SafetensorError) as error:
        raise UserError(f"{reward}: {file} cannot be read as weights: {str(error).splitlines()[0]}") from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise UserError(f"{reward}: {file} must hold weights by name, it holds {type(found).__name__}")
    return found
