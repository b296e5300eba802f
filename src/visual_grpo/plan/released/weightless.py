"""Modules of the real classes whose weights have shapes only, or random values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)
_device: ContextVar[str] = ContextVar("device", default="meta")


@contextmanager
def with_values_on(device: str) -> Iterator[None]:
    """What `frozen` builds meanwhile is on ``device``, with the random values that its classes start with."""
    token = _device.set(device)
    try:
        yield
    finally:
        _device.reset(token)


@contextmanager
def weightless(dtype: torch.dtype, device: str = "meta") -> Iterator[None]:
    """Modules that are built here are on ``device``, by default without values, and of this ``dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def frozen(build: Callable[[], Any], dtype: torch.dtype) -> Any:
    """What ``build`` gives, as `from_pretrained` leaves it: in evaluation mode, nothing trained.

    Without weights, except within `with_values_on`.
    """
    with weightless(dtype, _device.get()):
        module = build()
    _as_saved(module, dtype)
    if dtype == torch.float16:
        _keep_in_float32(module)
    return module.eval().requires_grad_(False)


def _as_saved(module: nn.Module, dtype: torch.dtype) -> None:
    """Numbers that a file holds beside the weights, such as SD3's fixed positions, are loaded as these are."""
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_floating_point() and name not in part._non_persistent_buffers_set:
                part.register_buffer(name, buffer.to(dtype))


def _keep_in_float32(module: nn.Module) -> None:
    """Parts that transformers does not load in float16, such as T5's last matrix of each feed-forward network."""
    kept = tuple(getattr(module, "_keep_in_fp32_modules", None) or ())
    for name, part in module.named_modules():
        if any(key in name.split(".") for key in kept):
            part.float()
