"""Networks of one model that take turns on a GPU: each has its weights there only while it computes.

accelerate's hooks say when (diffusers calls them before a network's forward, encode and decode, and asks them for the
device); what they do here is not accelerate's `CpuOffload`, which serves inference only: it would move the LoRA's
trained parameters away from their gradients and the optimiser's state, and copy weights back that nothing has changed.
Here the frozen weights stay on the host for good, pinned, and copies of them come and go. A LoRA is put on while its
network is on the device, and stays there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_TURN = "_turn"


def take_turns(networks: Mapping[str, nn.Module], device: torch.device) -> None:
    """From now on at most one of the frozen ``networks`` is on ``device``, and those that a caller needs together
    (`present`). They are on the host, or on the device called meta, where the copies are made, too. On a CPU nothing
    is done: all is where it computes."""
    if device.type == "cpu":
        return
    from accelerate.hooks import add_hook_to_module

    hook = _hook_class()
    turns = _Turns()
    for network in networks.values():
        vars(network)[_TURN] = turn = _Turn(network, device, turns)
        add_hook_to_module(network, hook(turn))


@contextmanager
def present(*networks: nn.Module) -> Iterator[None]:
    """Inside the block they are on their device, whatever else is called; they stay until another takes its turn."""
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


def put_away(*networks: nn.Module) -> None:
    """Those that take turns leave their device."""
    for network in networks:
        if _TURN in vars(network):
            vars(network)[_TURN].leave()


def brought(*networks: nn.Module) -> int:
    """Bytes that have been copied to the device for those that take turns."""
    return sum(vars(network)[_TURN].brought for network in networks if _TURN in vars(network))


def on_device(network: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers without those that wait on the host."""
    hosts = {id(tensor) for tensor in _hosts(network)}
    for tensor in (*network.parameters(), *network.buffers()):
        if id(tensor) not in hosts:
            yield tensor


def pinned_bytes(*networks: nn.Module) -> int:
    """What those that take turns keep on the host of a GPU: torch rounds each pinned tensor up to a power of two."""
    hosts = (tensor for network in networks for tensor in _hosts(network))
    return sum(1 << (tensor.nbytes - 1).bit_length() for tensor in hosts if tensor.nbytes)


def _hosts(network: nn.Module) -> list[Tensor]:
    turn = vars(network).get(_TURN)
    return [] if turn is None else list({id(place.host): place.host for place in turn.places}.values())


@dataclass(frozen=True)
class _Place:
    """Where a network keeps one of its tensors."""

    tensors: dict[str, Any]
    """Parameters or buffers of one of its layers."""
    name: str
    host: Tensor


class _Turns:
    """Who is on the device."""

    def __init__(self) -> None:
        self.there: list[_Turn] = []


class _Turn:
    """Of one network. A tensor that several layers share is copied once."""

    def __init__(self, network: nn.Module, device: torch.device, turns: _Turns) -> None:
        self.device, self.needed, self.brought, self._turns = device, 0, 0, turns
        where: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for layer in network.modules():
            for tensors in (layer._parameters, layer._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        where.setdefault(id(tensor), []).append((tensors, name))
        self.places = [place for shared in where.values() for place in _pinned_places(shared, device)]

    def come(self) -> None:
        if self in self._turns.there:
            return
        for other in list(self._turns.there):
            if not other.needed:
                other.leave()
        copies: dict[int, Tensor] = {}
        for place in self.places:
            if id(place.host) not in copies:
                copies[id(place.host)] = _copied(place.host, self.device)
        self._put(lambda host: copies[id(host)])
        self.brought += sum(copy.nbytes for copy in copies.values())
        self._turns.there.append(self)

    def leave(self) -> None:
        if self in self._turns.there:
            self._turns.there.remove(self)
            self._put(lambda host: host)

    def _put(self, chosen: Any) -> None:
        for place in self.places:
            place.tensors[place.name] = chosen(place.host)


def _pinned_places(shared: list[tuple[dict[str, Any], str]], device: torch.device) -> list[_Place]:
    """Those of one tensor, which is freed before the next is pinned."""
    tensors, name = shared[0]
    host = _pinned(tensors[name], device)
    for tensors, name in shared:
        tensors[name] = host
    return [_Place(tensors, name, host) for tensors, name in shared]


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """The same on the host, where a GPU can copy it from while the host goes on."""
    return _like(tensor, tensor.detach().pin_memory()) if device.type == "cuda" else tensor


def _copied(host: Tensor, device: torch.device) -> Tensor:
    if host.device == device:  # meta, where a plan counts what is there.
        return _like(host, host.clone())
    return _like(host, host.to(device, non_blocking=True))


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    return nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values


def _hook_class() -> Any:
    from accelerate.hooks import ModelHook

    class Comes(ModelHook):
        """Before a network is called."""

        def __init__(self, turn: _Turn) -> None:
            self.turn, self.execution_device = turn, turn.device

        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            self.turn.come()
            return args, kwargs

    return Comes
