"""Nested values of tensors, numbers, texts and dataclasses, as safetensors and JSON can hold them.

So a rollout can go into a checkpoint whatever its policy keeps in it. Only dataclasses that are in use already are made
again: a checkpoint cannot name code to be imported or called.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from visual_grpo.errors import UserError


class CannotPackError(TypeError):
    """A value of another kind; the message names its type."""


def pack(value: Any) -> tuple[dict[str, Tensor], Any]:
    """Tensors by their names, and the rest as JSON; `unpack` makes an equal value of both.

    Raises:
        CannotPackError: there is something in it that is neither a tensor, a number, a text, a path, a list, a tuple, a
            mapping of texts nor a dataclass.
    """
    packer = _Packer()
    structure = packer.pack(value)
    return packer.tensors, structure


class _Packer:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        """id of a tensor -> its name; one that occurs several times is written once."""

    def pack(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Tensor):
            name = self._names.setdefault(id(value), str(len(self._names)))
            self.tensors[name] = value
            # A matrix product may round otherwise for other strides.
            return {"tensor": name, "strides": list(value.stride()), "on_cpu": value.device.type == "cpu"}
        if isinstance(value, PurePath):
            return {"path": str(value)}
        if isinstance(value, list | tuple):
            return {"list" if isinstance(value, list) else "tuple": [self.pack(entry) for entry in value]}
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            # Pairs, so that no key is taken for one of these.
            return {"mapping": [[key, self.pack(entry)] for key, entry in value.items()]}
        if dataclasses.is_dataclass(value) and not isinstance(value, type) and _find(_name(type(value))) is type(value):
            fields = {field.name: self.pack(getattr(value, field.name)) for field in dataclasses.fields(value)}
            return {"dataclass": _name(type(value)), "fields": fields}
        raise CannotPackError(
            f"a {type(value).__module__}.{type(value).__qualname__} cannot be written to a checkpoint"
        )


def unpack(tensors: Mapping[str, Tensor], packed: Any, device: torch.device) -> Any:
    """What `pack` was given; ``device`` is where the tensors that were not on the CPU are put."""
    if not isinstance(packed, dict):
        return packed
    if "tensor" in packed:
        stored = tensors[packed["tensor"]].to("cpu" if packed["on_cpu"] else device)
        return _with_strides(stored, packed["strides"])
    if "path" in packed:
        return Path(packed["path"])
    if "mapping" in packed:
        return {key: unpack(tensors, entry, device) for key, entry in packed["mapping"]}
    if "dataclass" in packed:
        fields = {name: unpack(tensors, entry, device) for name, entry in packed["fields"].items()}
        kind = _find(packed["dataclass"])
        if kind is None:
            raise UserError(f"The checkpoint holds a {packed['dataclass']}, which this run does not use.")
        return kind(**fields)
    entries = [unpack(tensors, entry, device) for entry in packed["list" if "list" in packed else "tuple"]]
    return entries if "list" in packed else tuple(entries)


def _with_strides(stored: Tensor, strides: list[int]) -> Tensor:
    if list(stored.stride()) == strides or 0 in strides:
        return stored
    return torch.empty_strided(stored.shape, strides, dtype=stored.dtype, device=stored.device).copy_(stored)


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _find(name: str) -> Any:
    """The dataclass of that name in a module that is imported already; None if there is none."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and dataclasses.is_dataclass(found) else None
