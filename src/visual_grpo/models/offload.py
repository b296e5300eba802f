"""Keeps one network of a model on the GPU at a time: frozen weights are copied to it only while they compute.

accelerate's `CpuOffload` serves inference only, since it moves trained parameters away from their gradients. Here
pinned weights stay on the host, copies of them come and go, and a LoRA stays on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor, nn

_STATE = "_offload_state"


def enable_offload(networks: Mapping[str, nn.Module], device: torch.device) -> None:
    """Keeps at most one of the frozen ``networks`` on ``device``, and those inside `on_device`. Does nothing on a CPU.

    ``networks`` are in host memory; for a plan, they and their copies are on the meta device.
    """
    if device.type == "cpu":
        return

    class CopyFirst(ModelHook):
        def __init__(self, state: _OffloadState) -> None:
            self.state, self.execution_device = state, state.device

        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            self.state.to_device()
            return args, kwargs

    resident: list[_OffloadState] = []
    for network in networks.values():
        vars(network)[_STATE] = state = _OffloadState(network, device, resident)
        add_hook_to_module(network, CopyFirst(state))


@contextmanager
def on_device(*networks: nn.Module) -> Iterator[None]:
    """Keeps ``networks`` on their device inside the block; they stay until a different network needs it."""
    states = [vars(network)[_STATE] for network in networks if _STATE in vars(network)]
    for state in states:
        state.needed += 1
    try:
        for state in states:
            state.to_device()
        yield
    finally:
        for state in states:
            state.needed -= 1


def move_to_host(*networks: nn.Module) -> None:
    """Takes offloaded networks off their device."""
    for network in networks:
        if _STATE in vars(network):
            vars(network)[_STATE].to_host()


def copied_bytes(*networks: nn.Module) -> int:
    """Counts the bytes that were copied to the device."""
    return sum(vars(network)[_STATE].brought for network in networks if _STATE in vars(network))


def device_tensors(network: nn.Module) -> Iterator[Tensor]:
    """Yields parameters and buffers without those that wait on the host."""
    hosts = {id(host) for host in _hosts(network)}
    yield from (tensor for tensor in (*network.parameters(), *network.buffers()) if id(tensor) not in hosts)


def pinned_bytes(*networks: nn.Module) -> int:
    """Counts host memory: torch rounds each pinned tensor up to a power of two."""
    sizes = (host.nbytes for network in networks for host in _hosts(network))
    return sum(1 << (size - 1).bit_length() for size in sizes if size)


def _hosts(network: nn.Module) -> list[Tensor]:
    state = vars(network).get(_STATE)
    return [] if state is None else list({id(host): host for _, _, host in state.places}.values())


class _OffloadState:
    """The frozen tensors of one network; a tensor that several layers share is copied once."""

    def __init__(self, network: nn.Module, device: torch.device, resident: list[_OffloadState]) -> None:
        """``resident``: states of the networks on the device, shared by all."""
        self.device, self.needed, self.brought, self._resident = device, 0, 0, resident
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

    def to_device(self) -> None:
        if self in self._resident:
            return
        for other in list(self._resident):
            if not other.needed:
                other.to_host()
        copies: dict[int, Tensor] = {}
        for tensors, name, host in self.places:
            if id(host) not in copies:
                copies[id(host)] = _copied(host, self.device)
                self.brought += host.nbytes
            tensors[name] = copies[id(host)]
        self._resident.append(self)

    def to_host(self) -> None:
        if self in self._resident:
            self._resident.remove(self)
            for tensors, name, host in self.places:
                tensors[name] = host


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """Pins host memory, so that a GPU can copy it while the host goes on."""
    return _like(tensor, tensor.detach().pin_memory()) if device.type == "cuda" else tensor


def _copied(host: Tensor, device: torch.device) -> Tensor:
    """Copies to ``device``; on the meta device it clones, so that a plan counts the bytes."""
    return _like(host, host.clone() if host.device == device else host.to(device, non_blocking=True))


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    return nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values
