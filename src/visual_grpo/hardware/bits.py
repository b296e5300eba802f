"""The optional library bitsandbytes, which stores numbers in 8 or 4 bits, on a CPU as on a GPU.

It is no dependency: peft imports it wherever it is installed, which makes every command start seconds later.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from visual_grpo.errors import UserError

_INSTALL = "Install it with `make quantised`"


def require_bitsandbytes(setting: str, value: str) -> None:
    """Raises UserError where the library is not installed, without importing it; ``setting`` and ``value`` say which
    parameter asks for it."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            f"{setting} is {value}, which needs the library bitsandbytes; it is not installed. {_INSTALL}, or leave"
            f" {setting} out."
        )


def bitsandbytes(setting: str, value: str, device: torch.device) -> Any:
    """The library, after a try on ``device``.

    Raises:
        UserError: it is not installed, or has no working kernels for the device.
    """
    require_bitsandbytes(setting, value)
    try:
        import bitsandbytes as library

        _try(device)
    except (ImportError, RuntimeError, OSError) as error:
        raise UserError(
            f"{setting} is {value}, but bitsandbytes does not work on {device}: {error}\n{_INSTALL} again, look at"
            f" `python -m bitsandbytes`, or leave {setting} out."
        ) from error
    return library


def _try(device: torch.device) -> None:
    if device.type == "meta":
        return
    numbers = torch.linspace(-1, 1, 64, device=device)
    codes, scales = torch.ops.bitsandbytes.quantize_4bit(numbers, 64, "nf4", torch.uint8)
    found = torch.ops.bitsandbytes.dequantize_4bit(codes, scales, 64, "nf4", [1, 64], torch.float32)
    if not torch.allclose(found[0], numbers, atol=0.2):
        raise RuntimeError("what it quantises does not come back")
