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
    """Copies what of the frozen ``networks`` lies on the CPU and begins elsewhere.

    The same view of the same memory is copied once, so that tied weights take no more memory than before; of two
    different views each gets a copy.
    """
    copies: dict[tuple[object, ...], Tensor] = {}
    for network in networks:
        for tensor in (*network.parameters(), *network.buffers()):
            if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT:
                view = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
                copy = copies.get(view)
                copies[view] = tensor.data = tensor.data.clone() if copy is None else copy
