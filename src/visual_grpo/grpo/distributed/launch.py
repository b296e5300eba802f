"""Starts the other ranks of a command on this machine, or takes those that torchrun has started on several."""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from importlib import metadata
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing import _prctl_pr_set_pdeathsig as end_with_parent  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import ProcessContext, ProcessException, ProcessExitedException, start_processes

from visual_grpo.common.device import in_thread, resolve_device, share_cores
from visual_grpo.common.digests import content_digest, tree_digest
from visual_grpo.common.errors import LostRankError, UserError
from visual_grpo.common.quiet_libraries import silence_libraries
from visual_grpo.config import Parameters
from visual_grpo.grpo.distributed import ranks, sharding

_RANK_0_DECIDES = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_KEEPALIVE = {"KEEPIDLE": 4, "KEEPINTVL": 4, "KEEPCNT": 2, "USER_TIMEOUT": 12_000}
"""A connection to another host is lost after 12 silent seconds; gloo itself would wait for `ranks.TIMEOUT`."""

_jobs: Any = None
"""The process group on which the other ranks wait for their next job."""


@contextmanager
def running_ranks(config: Parameters, job: Callable[..., None], **arguments: Any) -> Iterator[None]:
    """Makes the other ranks run ``job(config, **arguments)`` during the block, which rank 0 runs.

    Raises:
        UserError: hosts differ, or an error of any rank.
        LostRankError: a rank has ended; says how, as far as that is known.
    """
    if config.distributed.processes == 1:
        yield
        return
    with nullcontext() if dist.is_initialized() else _started(config.distributed.processes):
        try:
            _announce((job, config, arguments))
            _begin(config, arguments)
            yield
        finally:
            sharding.end()
            share_cores(1)


def run_under_torchrun(command: Callable[[], object]) -> None:
    """Called on all ranks of a torchrun: rank 0 runs ``command``, the others its jobs."""
    one_host = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
    if one_host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _join()
    if not one_host:
        _notice_lost_hosts()
    try:
        if ranks.rank():
            _follow_rank_0()
        else:
            end_with_parent(signal.SIGTERM)
            command()
            _announce(None)
    except BaseException:  # torchrun ends the others, and may start all again.
        try:
            dist.distributed_c10d._get_default_store().check([""])
        except RuntimeError:  # The host of its store is gone: torchrun would wait for a quarter of an hour.
            os.kill(os.getppid(), signal.SIGKILL)
        raise


@contextmanager
def _started(count: int) -> Iterator[None]:
    """Runs the other ranks as processes of this machine during the block."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = TCPStore("127.0.0.1", 0, count, is_master=True, wait_for_workers=False, timeout=ranks.TIMEOUT)
    # A terminal sends Ctrl-C to all: without the delay a new process would end before it can ignore it.
    resource_tracker.ensure_running()  # Its start would end the delay.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _RANK_0_DECIDES)
    try:
        others = start_processes(_run_started, (count, store.port), nprocs=count - 1, join=False, daemon=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        joined = in_thread(lambda: _join(store=store, rank=0, world_size=count), "joining")
        while not joined.done():
            if multiprocessing.connection.wait(others.sentinels, timeout=0.05):
                raise LostRankError("A process did not start.")
        joined.result()
        yield
    except LostRankError as error:
        raise LostRankError(_cause(others) or str(error)) from error
    finally:
        for process in others.processes:
            process.kill()
            process.join()
        if dist.is_initialized():
            dist.destroy_process_group()


def _cause(others: ProcessContext) -> str | None:
    """Says which process was the first to fail, and how; waits a moment for its end."""
    try:
        for _ in range(30):
            others.join(0.1, grace_period=0)
    except ProcessException as end:
        how = end.msg[end.msg.index("terminated") :].strip()
        hint = ". The usual cause is too little memory: each process has the model (distributed.processes)."
        killed = isinstance(end, ProcessExitedException)
        return f"Process {end.error_index + 2} of this command (pid {end.error_pid}) {how}{hint if killed else ''}"
    return None


def _run_started(index: int, count: int, port: int) -> None:
    silence_libraries()
    _join(store=TCPStore("127.0.0.1", port, count, timeout=ranks.TIMEOUT), rank=index + 1, world_size=count)
    _follow_rank_0()


def _join(**rendezvous: Any) -> None:
    """Joins the process group by the store, rank and count given, or by those of torchrun."""
    global _jobs
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=ranks.TIMEOUT, **rendezvous)
    _jobs = dist.new_group(backend="gloo", timeout=timedelta(days=365))


def _announce(job: Any) -> Any:
    """Sends rank 0's job to the others, which get it, hours later perhaps; None = the command has ended."""
    sent = [job]
    ranks.collective(lambda: dist.broadcast_object_list(sent, group=_jobs))
    return sent[0]


def _follow_rank_0() -> None:
    """Runs one job after the other until rank 0 ends."""
    end_with_parent(signal.SIGKILL)
    for number in _RANK_0_DECIDES:
        signal.signal(number, signal.SIG_IGN)
    try:
        while (announced := _announce(None)) is not None:
            job, config, arguments = announced
            job(_begin(config, arguments), **arguments)
            sharding.end()
    except LostRankError as error:
        # Otherwise rank 0 looks for the process that failed first.
        sys.exit(f"Error: {error}" if dist.is_torchelastic_launched() else 0)


def _begin(config: Parameters, arguments: Mapping[str, Any]) -> Parameters:
    """Prepares this rank for a job; returns the configuration with its own GPU."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.count()))
    share_cores(here, sharded=config.distributed.sharded)
    if here < ranks.count():
        _require_same_hosts([path for name in ("model", "adapters", "start") if (path := arguments.get(name))])
    device = resolve_device(config.model.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", ranks.rank())))
        torch.cuda.set_device(device)
    if config.distributed.sharded:
        sharding.begin(device)
    return config.model_copy(update={"model": config.model.model_copy(update={"device": str(device)})})


def _require_same_hosts(folders: list[Path | str]) -> None:
    """Raises UserError where packages, code or files differ: then a sample would depend on who draws it."""
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
