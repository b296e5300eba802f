"""The torch device of a model, and the library that quantizes on it."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import torch

from visual_grpo.common.errors import UserError


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


def require_bitsandbytes(setting: str, value: str) -> None:
    """Raises UserError where the library is not installed, without importing it.

    It is no dependency: peft imports it wherever it is installed, which makes every command start seconds later.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            f"{setting} is {value}, which needs the library bitsandbytes; it is not installed. Install it with"
            f" `make quantised`, or leave {setting} out."
        )


def bitsandbytes(setting: str, value: str, device: torch.device) -> Any:
    """Returns the library. Raises UserError where it is missing, or does not work on ``device``."""
    require_bitsandbytes(setting, value)
    try:
        import bitsandbytes as library

        if device.type != "meta":
            numbers = torch.linspace(-1, 1, 64, device=device)
            torch.ops.bitsandbytes.quantize_4bit(numbers, 64, "nf4", torch.uint8)
    except (ImportError, RuntimeError, OSError) as error:
        raise UserError(
            f"{setting} is {value}, but bitsandbytes does not work on {device}: {error}\nInstall it again with"
            f" `make quantised`, look at `python -m bitsandbytes`, or leave {setting} out."
        ) from error
    return library
