"""Values on their way between two processes: JSON and safetensors, so that nothing in them can be executed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from visual_grpo.grpo import packing
from visual_grpo.sharing.frames import Channel

_LENGTH = 8
"""Bytes before the JSON, which say how long it is."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A value that remembers which of its tensors were on a GPU while it is kept on the CPU."""

    tensors: Mapping[str, Tensor]
    structure: str
    """JSON of `grpo.packing`."""

    @classmethod
    def of(cls, value: Any) -> Packed:
        tensors, structure = packing.pack(value)
        return cls(tensors=tensors, structure=json.dumps(structure, ensure_ascii=False))

    def unpacked(self, device: torch.device) -> Any:
        """The value, with those tensors on ``device``."""
        return packing.unpack(self.tensors, json.loads(self.structure), device)


class Messages:
    """One end of a connection. What is no tensor is as `grpo.packing` takes it: dataclasses, lists, mappings, texts."""

    def __init__(self, connection: Channel) -> None:
        self._connection = connection

    def send(self, value: Any) -> None:
        """Raises OSError where the other process has ended."""
        tensors, structure = packing.pack(value)
        head = json.dumps(structure, ensure_ascii=False).encode()
        body = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})
        self._connection.send_bytes(len(head).to_bytes(_LENGTH, "big") + head + body)

    def receive(self) -> Any:
        """Waits for the next value; all its tensors are on the CPU.

        Raises EOFError or OSError where the other process has ended.
        """
        read = self._connection.recv_bytes()
        start = _LENGTH + int.from_bytes(read[:_LENGTH], "big")
        return packing.unpack(load(read[start:]), json.loads(read[_LENGTH:start]), torch.device("cpu"))

    def close(self) -> None:
        self._connection.close()
