"""The ranks that torchrun has started: rank 0 runs the command, the other ranks its jobs."""

from __future__ import annotations

import hmac
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import _prctl_pr_set_pdeathsig as end_with_parent  # type: ignore[attr-defined]

from visual_grpo.common.device import in_thread, resolve_device, share_cores
from visual_grpo.common.digests import content_digest, tree_digest
from visual_grpo.common.errors import LostRankError, UserError
from visual_grpo.common.processes import STORE, TERMINATING
from visual_grpo.config import Parameters
from visual_grpo.grpo.distributed import ranks, sharding, silence

_GRACE = 10.0
"""Seconds in which rank 0 reports an error that other ranks have too, before torchrun ends all."""
_KEEPALIVE = {"KEEPIDLE": 4, "KEEPINTVL": 4, "KEEPCNT": 2, "USER_TIMEOUT": 12_000}
"""A connection to a different host is lost after 12 silent seconds; gloo itself would wait for `ranks.TIMEOUT`."""

_PATIENCE = timedelta(minutes=1)
"""How long a process that has joined may take to prove its identity."""
_A_YEAR = timedelta(days=365)

_jobs: Any = None
"""The process group on which the other ranks wait for their next job."""


def run_under_torchrun(command: Callable[[], object]) -> None:
    """Runs ``command`` on rank 0, and its jobs on the other ranks."""
    end_with_parent(signal.SIGKILL)
    one_host = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
    if one_host:
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    in_thread(_join, "joining").result()  # Signals reach the main thread.
    if not one_host:
        _notice_lost_hosts()
    try:
        if ranks.rank():
            _follow_rank_0()
        else:
            in_thread(lambda: silence.tell(ranks.TIMEOUT), "silence")
            command()
            _announce(None)
        dist.destroy_process_group()  # Otherwise its threads may abort the process at exit.
    except BaseException:  # torchrun ends the other ranks, and may start all again.
        try:
            dist.distributed_c10d._get_default_store().check([""])
        except RuntimeError:  # The host of its store is gone: torchrun would wait for a quarter of an hour.
            os.kill(os.getppid(), signal.SIGKILL)
        raise


@contextmanager
def running_ranks(spec: Any, job: Callable[..., None], **arguments: Any) -> Iterator[None]:
    """Makes the other ranks run ``job(spec, **arguments)`` during the block, which rank 0 runs.

    Args:
        spec: a `RunSpec`; each rank gets one with its own GPU.

    Raises:
        UserError: hosts differ, or an error of any rank.
        LostRankError: a rank has ended.
    """
    if ranks.count() == 1:
        yield
        return
    try:
        _announce((job, spec, arguments))
        _begin(spec, arguments)
        yield
    finally:
        sharding.end()
        share_cores(1)


def _join() -> None:
    global _jobs
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if STORE not in os.environ:
        dist.init_process_group(backend, timeout=ranks.TIMEOUT)
        _jobs = dist.new_group(backend="gloo", timeout=_A_YEAR)
        return
    number, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ[STORE], count)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=ranks.TIMEOUT)
    _jobs = dist.new_group(backend="gloo", timeout=_A_YEAR)
    for group in (dist.group.WORLD, _jobs):
        recognise(group, os.environ["TORCHELASTIC_RUN_ID"])


def recognise(group: Any, secret: str) -> None:
    """Checks that each connection of ``group`` leads to a process that knows ``secret``.

    Gloo takes whoever connects first to the port of a rank, and what the ranks send each other is unpickled.

    Args:
        group: a process group of gloo, all of whose ranks call this.

    Raises:
        LostRankError: one does not know the secret, or is silent for `_PATIENCE`.
    """

    def proof(sender: int, receiver: int) -> bytes:
        return hmac.digest(secret.encode(), f"{sender} {receiver}".encode(), "sha256")

    own = group.rank()
    others = [rank for rank in range(group.size()) if rank != own]
    received = {rank: torch.zeros(32, dtype=torch.uint8) for rank in others}
    sent = {rank: torch.frombuffer(bytearray(proof(own, rank)), dtype=torch.uint8) for rank in others}
    work = [group.recv([received[rank]], rank, 0) for rank in others]
    work += [group.send([sent[rank]], rank, 0) for rank in others]
    try:
        for each in work:
            each.wait(_PATIENCE)
    except RuntimeError as error:
        raise LostRankError(f"The processes of this command do not reach each other: {error}") from error
    strangers = [r for r, given in received.items() if not hmac.compare_digest(given.numpy().tobytes(), proof(r, own))]
    if strangers:
        raise LostRankError(
            f"A process that is not part of this command answers in the place of its process {strangers[0] + 1}."
        )


def _announce(job: Any) -> Any:
    """Sends rank 0's job to the other ranks, which get it, hours later perhaps; None = the command has ended."""
    sent = [job]
    ranks.collective(lambda: dist.broadcast_object_list(sent, group=_jobs))
    return sent[0]


def _follow_rank_0() -> None:
    """Runs one job after the other until rank 0 ends."""
    for number in (signal.SIGINT, *TERMINATING):  # Rank 0 decides.
        signal.signal(number, signal.SIG_IGN)
    try:
        while (announced := _announce(None)) is not None:
            job, spec, arguments = announced
            job(_begin(spec, arguments), **arguments)
            sharding.end()
    except LostRankError as error:
        sys.exit(f"Error: {error}")
    except Exception:
        with suppress(LostRankError, TimeoutError):
            in_thread(lambda: _announce(None), "end of rank 0").result(_GRACE)
        raise


def _begin(spec: Any, arguments: Mapping[str, Any]) -> Any:
    """Prepares this rank for a job; returns ``spec`` with its own GPU."""
    config: Parameters = spec.config
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    share_cores(here, sharded=config.distributed.sharded)
    if here < ranks.count():
        folders = [arguments.get(name) for name in ("adapters", "start")]
        _require_same_hosts([spec.config.model.path, *filter(None, folders)])
    device = resolve_device(config.model.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if config.distributed.sharded:
        sharding.begin(device)
    model = config.model.model_copy(update={"device": str(device)})
    return replace(spec, config=config.model_copy(update={"model": model}))


def _require_same_hosts(folders: list[Path | str]) -> None:
    """Raises UserError where packages, code or files differ: then a sample would depend on its rank."""
    code, packages = Path(__file__).parents[2], {own.name: own.version for own in metadata.distributions()}
    local = tree_digest(code, code.rglob("*.py")), packages, [content_digest(own) for own in folders]
    (first, expected), *others = ranks.all_gather(lambda: (socket.gethostname(), local))
    for host, found in others:
        if found != expected:
            raise UserError(
                f"{host} and {first} differ in packages, code or the files of {', '.join(map(str, folders))}. Expected"
                " the same at the same path on every host, best on a shared file system."
            )


def _notice_lost_hosts() -> None:
    for file in Path("/proc/self/fd").glob("*"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(file.name))) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)
