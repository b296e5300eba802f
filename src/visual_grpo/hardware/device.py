"""Chooses the torch device of a model."""

from __future__ import annotations

import torch

from visual_grpo.errors import UserError


def device_kind(name: str) -> str:
    """``cpu`` or ``cuda``: what ``name`` asks for, whether it is there or not."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name.partition(":")[0]


def resolve_device(name: str, setting: str = "model.device") -> torch.device:
    """``auto`` is cuda if available, else cpu; ``setting`` is the parameter's name in error messages."""
    if name == "auto":
        return torch.device(device_kind(name))
    expected = UserError(f"{setting} is {name!r}; expected auto, cpu, cuda or cuda:N.")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise expected from error
    if device.type not in ("cpu", "cuda", "meta"):  # The last is a plan's.
        raise expected
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"{setting} is {name!r}, but torch finds no CUDA device; use auto or cpu.")
    return device
