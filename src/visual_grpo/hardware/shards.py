"""Frozen networks of which each process keeps a part of every layer, for models that do not fit on one GPU.

torch's FSDP2 (`fully_shard`) shards the layers, gathers a layer before it runs and frees it afterwards. Gathering is a
collective, and FSDP2 requires all processes to run the same layers in the same order. Here the processes work on
different prompts: texts differ in length, answers end at different tokens, and a process may have no sample at all. So
before each layer the processes agree on which one to gather, by a small all-reduce through gloo; a process that needs
another layer, or none, only contributes its shard (`lend`). What a process computes is then independent of the others.

Processes compute together in rounds. In each, a process that has finished its share, or has none, lends until no
process needs a layer any more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

_NONE = 1 << 30
"""A layer that there is not, for a process that needs none."""
TIMEOUT = timedelta(minutes=10)
"""After which a process that does not answer is taken to be lost."""


class LostPeerError(RuntimeError):
    """Another process did not take part in a gathering: it has ended, or something failed in it."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the processes find each other; the fields are JSON."""

    host: str
    port: int
    count: int
    """Of processes."""
    number: int = 0
    """Of the one that joins."""

    def of(self, number: int) -> dict[str, Any]:
        """As another process gets it."""
        return asdict(replace(self, number=number))


def open_meeting(count: int, host: str = "127.0.0.1") -> Meeting:
    """For ``count`` processes; the one that calls this is number 0 and must `join`, too."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    global _store
    _store = TCPStore(host, 0, count, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    return Meeting(host=host, port=_store.port, count=count)


def join(meeting: Meeting, device: torch.device, look: Callable[[], object] = lambda: None) -> None:
    """Waits for all processes; from now on `cut` cuts, until `leave`.

    ``look`` is called again and again while process 0 waits; it may raise.
    """
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    global _shards
    store = _store or TCPStore(meeting.host, meeting.port, meeting.count, timeout=TIMEOUT)
    if meeting.host == "127.0.0.1":  # Otherwise gloo looks the machine's name up, which may lead nowhere.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store.set(_here(meeting.number), "")
    while meeting.number == 0 and not store.check([_here(number) for number in range(meeting.count)]):
        look()
        time.sleep(0.1)
    if device.type == "cuda":
        # torchrun numbers the GPUs of a machine by LOCAL_RANK.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) if device.index is None else device.index)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=store,
        rank=meeting.number,
        world_size=meeting.count,
        timeout=TIMEOUT,
    )
    _shards = _Shards(device, meeting.count)


def _here(number: int) -> str:
    return f"visual_grpo/here/{number}"


def leave() -> None:
    """Ends what `open_meeting` and `join` began."""
    import torch.distributed as dist

    global _shards, _store
    if dist.is_initialized():
        dist.destroy_process_group()
    _shards = _store = None


def active() -> bool:
    """Between `join` and `leave`."""
    return _shards is not None


def cut(networks: Mapping[str, nn.Module], device: torch.device) -> None:
    """Every layer of the frozen ``networks`` is cut into as many parts as there are processes, each of which keeps one
    on ``device``. What is not in a row of like layers (embeddings, heads), or is a convolution, is put there whole."""
    assert _shards is not None
    for network in networks.values():
        for layer in layers_of(network):
            _shards.cut(layer)
        network.to(device)


def lend() -> None:
    """Holds out this process's part of whatever layer the others need, until none needs any."""
    if _shards is not None:
        while _shards.gather(None) != _NONE:
            pass


@contextmanager
def lending() -> Iterator[None]:
    """`lend` after the block, also where it fails: the others finish what they have begun."""
    try:
        yield
    except LostPeerError:
        raise
    except Exception:
        lend()
        raise
    lend()


class _Shards:
    """The layers that are cut, by the number that all processes know them by."""

    def __init__(self, device: torch.device, count: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self._mesh = init_device_mesh(device.type, (count,))
        self._layers: list[Any] = []
        self._firsts: list[tuple[nn.Module, str]] = []
        """Where each layer has one of its cut parameters."""

    def cut(self, layer: nn.Module) -> None:
        from torch.distributed.fsdp import fully_shard

        number = len(self._layers)
        self._firsts.append(
            next((part, name) for part in layer.modules() for name, own in part._parameters.items() if own is not None)
        )
        # Before FSDP2's own hooks, which then find a layer that is gathered already.
        layer.register_forward_hook(lambda _, __, output: self._before_backward(number, output))
        fully_shard(layer, mesh=self._mesh, reshard_after_forward=True)
        layer.register_forward_pre_hook(lambda *_: self._need(number), prepend=True)
        self._layers.append(layer)

    def _need(self, number: int) -> None:
        while not self._is_whole(number):
            self.gather(number)

    def _before_backward(self, number: int, output: Any) -> None:
        def need(gradient: Tensor) -> Tensor:
            self._need(number)
            return gradient

        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(need)

    def gather(self, wanted: int | None) -> int:
        """One gathering, of the layer that this returns; ``wanted`` is the one that this process needs.

        The first of those that are needed: processes in the same network come together again, and one that waits in
        another network waits at most until the others have done what they were asked for.
        """
        number = self._agreed(_NONE if wanted is None else wanted)
        if number == _NONE:
            return number
        layer, was_whole = self._layers[number], self._is_whole(number)
        try:
            if was_whole:  # Here already, as FSDP2 frees some layers only at the end of a backward pass.
                layer.reshard()
            layer.unshard()
        except RuntimeError as error:
            raise LostPeerError(f"A layer could not be gathered from all processes: {error}") from error
        if number != wanted and not was_whole:
            layer.reshard()
        return number

    def _agreed(self, wanted: int) -> int:
        import torch.distributed as dist

        asked = torch.tensor([wanted])
        try:
            dist.all_reduce(asked, op=dist.ReduceOp.MIN)
        except RuntimeError as error:
            raise LostPeerError(f"The processes could not agree on the next layer: {error}") from error
        return int(asked)

    def _is_whole(self, number: int) -> bool:
        from torch.distributed.tensor import DTensor

        part, name = self._firsts[number]
        return not isinstance(part._parameters[name], DTensor)


_shards: _Shards | None = None
_store: Any = None


def layers_of(network: nn.Module) -> list[nn.Module]:
    """The members of every outermost row of like layers; convolutions are left out, as a VAE is small."""
    found = []
    for part in network.children():
        if isinstance(part, nn.ModuleList) and _is_row(part):
            found += list(part)
        else:
            found += layers_of(part)
    return found


def _is_row(part: nn.ModuleList) -> bool:
    return (
        len(part) > 1
        and len({type(layer) for layer in part}) == 1
        and all(any(True for _ in layer.parameters()) for layer in part)
        and all(parameter.dim() <= 2 for parameter in part.parameters())
    )
