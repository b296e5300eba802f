"""Chooses the torch device of a model."""

from __future__ import annotations

import re

import torch

from visual_grpo.errors import UserError


def device_kind(name: str) -> str:
    """Returns ``cpu`` or ``cuda``, as ``name`` asks for, whether it is there or not."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name.partition(":")[0]


def resolve_device(name: str, setting: str = "model.device") -> torch.device:
    """``auto`` is cuda if available, else cpu; error messages call the parameter ``setting``."""
    if re.fullmatch(r"auto|cpu|meta|cuda(:\d+)?", name) is None:  # meta is a plan's.
        raise UserError(f"{setting} is {name!r}; expected auto, cpu, cuda or cuda:N.")
    device = torch.device(device_kind(name) if name == "auto" else name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"{setting} is {name!r}, but torch finds no CUDA device; use auto or cpu.")
    return device
