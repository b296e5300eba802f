"""Networks of one model that take turns on a GPU: each has its frozen weights there only while it computes.

accelerate's hooks say when. Its own `CpuOffload` serves inference only: it would move trained parameters away
from their gradients. Here pinned weights stay on the host, copies of them come and go, and a LoRA stays on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor, nn

_TURN = "_turn"


def enable_offload(networks: Mapping[str, nn.Module], device: torch.device) -> None:
    """Keeps at most one of the frozen ``networks`` on ``device``, and those that a caller needs together (`present`).

    They are on the host, or on the device called meta, where the copies are made, too. Does nothing on a CPU.
    """
    if device.type == "cpu":
        return

    class Come(ModelHook):
        def __init__(self, turn: _Turn) -> None:
            self.turn, self.execution_device = turn, turn.device

        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            self.turn.come()
            return args, kwargs

    there: list[_Turn] = []
    for network in networks.values():
        vars(network)[_TURN] = turn = _Turn(network, device, there)
        add_hook_to_module(network, Come(turn))


@contextmanager
def on_device(*networks: nn.Module) -> Iterator[None]:
    """Keeps them on their device inside the block; they stay until another takes its turn."""
    turns = [vars(network)[_TURN] for network in networks if _TURN in vars(network)]
    for turn in turns:
        turn.needed += 1
    try:
        for turn in turns:
            turn.come()
        yield
    finally:
        for turn in turns:
            turn.needed -= 1


def move_to_host(*networks: nn.Module) -> None:
    """Takes those with turns off their device."""
    for network in networks:
        if _TURN in vars(network):
            vars(network)[_TURN].leave()


def copied_bytes(*networks: nn.Module) -> int:
    """Counts the bytes that were copied to the device."""
    return sum(vars(network)[_TURN].brought for network in networks if _TURN in vars(network))


def device_tensors(network: nn.Module) -> Iterator[Tensor]:
    """Yields parameters and buffers without those that wait on the host."""
    hosts = {id(host) for host in _hosts(network)}
    yield from (tensor for tensor in (*network.parameters(), *network.buffers()) if id(tensor) not in hosts)


def pinned_bytes(*networks: nn.Module) -> int:
    """Counts host memory: torch rounds each pinned tensor up to a power of two."""
    sizes = (host.nbytes for network in networks for host in _hosts(network))
    return sum(1 << (size - 1).bit_length() for size in sizes if size)


def _hosts(network: nn.Module) -> list[Tensor]:
    turn = vars(network).get(_TURN)
    return [] if turn is None else list({id(host): host for _, _, host in turn.places}.values())


class _Turn:
    """The frozen tensors of one network. One that several layers share is copied once."""

    def __init__(self, network: nn.Module, device: torch.device, there: list[_Turn]) -> None:
        """``there``: whose turn it is, of all networks."""
        self.device, self.needed, self.brought, self._there = device, 0, 0, there
        self.places: list[tuple[dict[str, Any], str, Tensor]] = []
        """Parameters or buffers of a layer, the name of one, and its tensor on the host."""
        hosts: dict[int, Tensor] = {}
        for layer in network.modules():
            kept: tuple[dict[str, Any], ...] = (layer._parameters, layer._buffers)
            for tensors in kept:
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in hosts:  # The unpinned tensor is freed before the next one is pinned.
                        hosts[id(tensor)] = _pinned(tensor, device)
                    tensors[name] = hosts[id(tensor)]
                    self.places.append((tensors, name, tensors[name]))

    def come(self) -> None:
        if self in self._there:
            return
        for other in list(self._there):
            if not other.needed:
                other.leave()
        copies: dict[int, Tensor] = {}
        for tensors, name, host in self.places:
            if id(host) not in copies:
                copies[id(host)] = _copied(host, self.device)
                self.brought += host.nbytes
            tensors[name] = copies[id(host)]
        self._there.append(self)

    def leave(self) -> None:
        if self in self._there:
            self._there.remove(self)
            for tensors, name, host in self.places:
                tensors[name] = host


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """On a pinned host, so that a GPU can copy it while the host goes on."""
    return _like(tensor, tensor.detach().pin_memory()) if device.type == "cuda" else tensor


def _copied(host: Tensor, device: torch.device) -> Tensor:
    """On meta, a plan counts the copy."""
    return _like(host, host.clone() if host.device == device else host.to(device, non_blocking=True))


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    return nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values
