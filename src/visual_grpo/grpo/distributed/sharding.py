"""Frozen networks of which each rank keeps a part of every layer, for models that do not fit on one GPU.

torch's FSDP2 (`fully_shard`) gathers a layer before it runs and frees it afterwards, which all ranks must do in the
same order. Here prompts differ, answers end at different tokens, and a rank may have no prompt at all. So before each
layer they agree on which one to gather, by a small all-reduce; a rank that needs a different layer, or has finished its
part (`serve_gathers`), contributes its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from visual_grpo.common.errors import LostRankError
from visual_grpo.grpo.distributed import silence

_NO_LAYER = 1 << 30
"""Wanted by a rank that has finished its part."""
_mesh: DeviceMesh | None = None
_layers: list[Any] = []
"""Layers, in an order that is the same on all ranks."""


def begin(device: torch.device) -> None:
    """Makes `shard` distribute layers over all ranks of the process group, until `end`."""
    global _mesh
    _mesh = init_device_mesh(device.type, (dist.get_world_size(),))


def end() -> None:
    global _mesh
    _mesh = None
    _layers.clear()


def active() -> bool:
    return _mesh is not None


def shard(networks: Mapping[str, nn.Module], device: torch.device) -> None:
    """Shards every layer of the frozen ``networks``, and moves their rest (embeddings, heads, VAE) to ``device``."""
    from torch.distributed.fsdp import fully_shard  # Slow, and only needed here.

    for network in networks.values():
        for layer in layers_of(network):
            need = partial(_need, len(_layers))
            # Both before FSDP2's own hooks, which then find a layer that is gathered already.
            layer.register_forward_hook(partial(_before_backward, need))
            fully_shard(layer, mesh=_mesh, reshard_after_forward=True)
            layer.register_forward_pre_hook(need, prepend=True)
            _layers.append(layer)
        network.to(device)


def serve_gathers() -> None:
    """Contributes this rank's shards until no rank needs a layer."""
    while active() and _gather(_NO_LAYER) != _NO_LAYER:
        pass


def _need(number: int, *_: Any) -> None:
    while not _is_whole(_layers[number]):
        _gather(number)


def _before_backward(need: Callable[..., None], layer: nn.Module, given: Any, output: Any) -> None:
    for tensor in output if isinstance(output, tuple) else (output,):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(need)


def _gather(wanted: int) -> int:
    """Gathers the first layer that any rank wants, and returns its number."""
    try:
        asked = torch.tensor([wanted])
        with silence.waiting():
            dist.all_reduce(asked, op=dist.ReduceOp.MIN)
        number = int(asked)
        if number == _NO_LAYER:
            return number
        layer = _layers[number]
        was_whole = _is_whole(layer)
        if was_whole:  # FSDP2 frees some layers only at the end of a backward pass.
            layer.reshard()
        layer.unshard()
    except RuntimeError as error:
        raise LostRankError(f"A layer could not be gathered from all processes: {error}") from error
    if number != wanted and not was_whole:
        layer.reshard()
    return number


def _is_whole(layer: nn.Module) -> bool:
    from torch.distributed.tensor import DTensor

    return not any(isinstance(parameter, DTensor) for parameter in layer.parameters())


def layers_of(network: nn.Module) -> list[nn.Module]:
    """Returns the layers that diffusers and transformers keep in one piece; leaves out convolutions: a VAE is small."""
    names = getattr(network, "_no_split_modules", None) or ()
    layers = [layer for layer in network.modules() if type(layer).__name__ in names]
    return [layer for layer in layers if all(parameter.dim() <= 2 for parameter in layer.parameters())]
