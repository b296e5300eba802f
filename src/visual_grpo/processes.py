"""The other processes of a training, a baseline or an evaluation: what they build, and when there are any."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from visual_grpo import components
from visual_grpo.config import Parameters
from visual_grpo.errors import UserError, counted
from visual_grpo.joined_files import check_same, digests
from visual_grpo.policies.family import Model
from visual_grpo.sharing import crew
from visual_grpo.sharing.model import SharedModel
from visual_grpo.sharing.worker import Build, Trained
from visual_grpo.sharing.workers import Workers
from visual_grpo.third_party_output import silence_libraries
from visual_grpo.types import AdaptedModel


def start_workers(config: Parameters, model: str, start: Path | None) -> Workers | None:
    """The other processes of a training; a context that ends them. None where there are none.

    A training that is resumed always has it: its checkpoint may be in the middle of a step of several processes.
    """
    count = config.distributed.processes
    if count == 1 and config.resume == "never":
        return None
    return _workers(config, build_share, model=model, start=start)


def start_drawing(config: Parameters, model: str, adapters: Path | None) -> Workers | None:
    """The other processes of a baseline or an evaluation, as `start_workers`."""
    count = config.distributed.processes
    if count == 1:
        return None
    return _workers(config, build_drawing, model=model, adapters=adapters)


def shared_model(model: Model, workers: Workers | None) -> AdaptedModel:
    """``model``, of whose samples ``workers`` draw their share."""
    return model if workers is None else SharedModel(model, workers)


def build_share(config: Mapping[str, Any], model: str, start: str | None, device: str) -> Trained:
    """What another process of a training has.

    Args:
        config: the parameter tree, with secrets, as JSON has it.
        start: the folder of the adapters to start from.
    """
    silence_libraries()
    own = _on(device, Parameters.model_validate(config))
    plan = components.make_plan(own, model)
    built = components.build_model(own, model)
    policies, joint = components.build_policies(own, plan, built, None if start is None else Path(start))
    return Trained(policies=policies, joint=joint, model=built, device=device)


def build_drawing(config: Mapping[str, Any], model: str, adapters: str | None, device: str) -> Trained:
    """What another process of a baseline or an evaluation has; ``config`` as for `build_share`."""
    silence_libraries()
    own = _on(device, Parameters.model_validate(config))
    built = components.build_model(own, model, None if adapters is None else Path(adapters))
    return Trained(policies={}, model=built, device=device)


def builds(local_rank: int) -> dict[str, Build]:
    """What a process that has joined from another machine may be asked to build, by name.

    Args:
        local_rank: its number among the processes of its machine, and that of its GPU.
    """

    def joined(build: Build) -> Build:
        def checked(files: Mapping[str, str | None], device: str, **arguments: Any) -> Trained:
            check_same(files)
            return build(device=own_device(device, local_rank), **arguments)

        return checked

    return {build.__name__: joined(build) for build in (build_share, build_drawing)}


def own_device(kind: str, local_rank: int) -> str:
    """Raises UserError where this machine has too few GPUs."""
    import torch

    if kind != "cuda":
        return kind
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"{socket.gethostname()} has {counted(torch.cuda.device_count(), 'GPU')}, but processes of torchrun's up to"
            f" local rank {local_rank}: each needs one. Expected --nproc-per-node of at most the number of GPUs."
        )
    return f"cuda:{local_rank}"


def _on(device: str, config: Parameters) -> Parameters:
    return config.model_copy(update={"model": config.model.model_copy(update={"device": device})})


def _workers(config: Parameters, build: Build, *, model: str, **folders: Path | None) -> Workers:
    """The other processes, which call ``build``: those that have joined from other machines, or new ones here."""
    count, joined = config.distributed.processes, crew.present()
    named = {name: None if folder is None else str(folder) for name, folder in folders.items()}
    first, *devices = components.process_devices(config)
    sharded_on = first if config.distributed.sharded else None
    if joined is None:
        tree = config.model_dump(mode="json")
        arguments = [{"config": tree, "model": model, "device": own, **named} for own in devices]
        return Workers(count, build, arguments, sharded_on=sharded_on)
    given = {
        "config": config.public(),  # Rewards and trackers, which may have secrets, are the first one's.
        "model": model,
        "device": first.partition(":")[0],
        "files": digests(config, model, *named.values()),
        **named,
    }
    return Workers(count, build, [given] * (count - 1), joined, sharded_on=sharded_on)
