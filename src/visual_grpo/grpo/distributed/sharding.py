"""Frozen networks of which each rank keeps a part of every layer, for models that do not fit on one GPU.

torch's FSDP2 (`fully_shard`) gathers a layer before it runs and frees it afterwards, which all ranks must do in the
same order. Here prompts differ, answers end at different tokens, and a rank may have no prompt at all. So before each
layer they agree on which one to gather, by a small all-reduce; a rank that needs another layer, or has finished its
part (`serving_gathers`), contributes its shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from visual_grpo.common.errors import LostRankError

_NONE = 1 << 30
"""The layer number of a rank that needs no layer."""
_shards: _Shards | None = None


def begin(device: torch.device) -> None:
    """Makes `shard` distribute layers over all ranks of the process group, until `end`."""
    global _shards
    _shards = _Shards(device)


def end() -> None:
    global _shards
    _shards = None


def active() -> bool:
    return _shards is not None


def shard(networks: Mapping[str, nn.Module], device: torch.device) -> None:
    """Shards every layer of the frozen ``networks``, and moves their rest (embeddings, heads, VAE) to ``device``."""
    assert _shards is not None
    for network in networks.values():
        for layer in layers_of(network):
            _shards.shard(layer)
        network.to(device)


@contextmanager
def serving_gathers() -> Iterator[None]:
    """Contributes to gathers after the block, also if it fails, until no rank needs any."""
    try:
        yield
    except LostRankError:
        raise
    except Exception:
        _serve()
        raise
    _serve()


def _serve() -> None:
    while _shards is not None and _shards.gather(None) != _NONE:
        pass


class _Shards:
    """The sharded layers, by the number that all ranks know them by."""

    def __init__(self, device: torch.device) -> None:
        self._mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self._layers: list[Any] = []
        self._firsts: list[tuple[nn.Module, str]] = []
        """Where each layer has one of its sharded parameters."""

    def shard(self, layer: nn.Module) -> None:
        number = len(self._layers)
        self._firsts.append(
            next((part, name) for part in layer.modules() for name, own in part._parameters.items() if own is not None)
        )
        # Both before FSDP2's own hooks, which then find a layer that is gathered already.
        layer.register_forward_hook(lambda _, __, output: self._before_backward(number, output))
        fully_shard(layer, mesh=self._mesh, reshard_after_forward=True)
        layer.register_forward_pre_hook(lambda *_: self._need(number), prepend=True)
        self._layers.append(layer)

    def _need(self, number: int) -> None:
        while not self._is_whole(number):
            self.gather(number)

    def _before_backward(self, number: int, output: Any) -> None:
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self._need(number))

    def gather(self, wanted: int | None) -> int:
        """Gathers the first layer that any rank wants, and returns its number."""
        try:
            asked = torch.tensor([_NONE if wanted is None else wanted])
            dist.all_reduce(asked, op=dist.ReduceOp.MIN)
            number = int(asked)
            if number == _NONE:
                return number
            layer, was_whole = self._layers[number], self._is_whole(number)
            if was_whole:  # FSDP2 frees some layers only at the end of a backward pass.
                layer.reshard()
            layer.unshard()
        except RuntimeError as error:
            raise LostRankError(f"A layer could not be gathered from all processes: {error}") from error
        if number != wanted and not was_whole:
            layer.reshard()
        return number

    def _is_whole(self, number: int) -> bool:
        part, name = self._firsts[number]
        return not isinstance(part._parameters[name], DTensor)


def layers_of(network: nn.Module) -> list[nn.Module]:
    """Returns the members of every outermost row of like layers; leaves out convolutions, as a VAE is small."""
    found = []
    for part in network.children():
        found += list(part) if isinstance(part, nn.ModuleList) and _is_row(part) else layers_of(part)
    return found


def _is_row(part: nn.ModuleList) -> bool:
    return (
        len(part) > 1
        and len({type(layer) for layer in part}) == 1
        and all(any(True for _ in layer.parameters()) for layer in part)
        and all(parameter.dim() <= 2 for parameter in part.parameters())
    )
