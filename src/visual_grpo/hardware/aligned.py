"""Weights that begin where a CPU's vectors do.

MKL rounds a product of few rows by where its weights begin in memory. Those that safetensors maps from a file begin at
any multiple of 8 bytes, those that torch allocates or gathers from other processes at one of 64: the same model would
compute other last bits by how it came into memory.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

ALIGNMENT = 64
"""Bytes; what torch allocates on a CPU begins at a multiple of it."""


@torch.no_grad()
def align(networks: Iterable[nn.Module]) -> None:
    """Copies what of the ``networks`` lies on the CPU and begins elsewhere; tied weights stay tied."""
    copies: dict[tuple[int, torch.Size], Tensor] = {}
    for network in networks:
        for tensor in (*network.parameters(), *network.buffers()):
            begin = tensor.data_ptr()
            if tensor.device.type == "cpu" and begin % ALIGNMENT:
                copy = copies.get((begin, tensor.shape))
                copies[begin, tensor.shape] = tensor.data = tensor.data.clone() if copy is None else copy
