"""Starts the other ranks of a command on this machine, or takes those that torchrun has started on several."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import platform
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib import metadata
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from visual_grpo.common.device import resolve_device, share_cores
from visual_grpo.common.digests import content_digest
from visual_grpo.common.errors import LostRankError, UserError, counted, user_error
from visual_grpo.common.machine_errors import machine_fault
from visual_grpo.common.quiet_libraries import silence_libraries
from visual_grpo.config import Parameters
from visual_grpo.grpo.distributed import ranks, sharding

EXIT_PEER_LOST = 2
"""Exit code of a rank that ends because another one is gone."""
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals on which rank 0 decides for all."""
_LIBRARIES = ("torch", "transformers", "diffusers", "peft", "tokenizers", "safetensors")
_END = b"end"
_NOTICED = 12
"""Seconds after which a silent connection to another host counts as lost."""

_store: Any = None
"""Tells the other ranks that a job has begun, which may be hours away, and rank 0 why one has failed."""
_jobs = 0


@contextmanager
def running_ranks(config: Parameters, job: Callable[..., None], **arguments: Any) -> Iterator[None]:
    """Makes the other ranks run ``job(config, **arguments)`` during the block, which rank 0 runs.

    Each rank's configuration names its own GPU.

    Raises:
        UserError: a machine has too few GPUs, hosts differ, or an error of any rank.
        LostRankError: a rank has ended; says how, as far as that is known.
    """
    global _jobs
    if config.distributed.processes == 1:
        yield
        return
    launched = dist.is_initialized()
    started = [] if launched else _start(config.distributed.processes)
    try:
        _store.set(f"job/{_jobs}", "")
        _jobs += 1
        ranks.broadcast(lambda: (job, config, arguments))
        _begin(config, arguments)
        yield
    except LostRankError as error:
        raise LostRankError(_cause(error, started)) from error
    finally:
        sharding.end()
        share_cores(1)
        if not launched:
            _end(started)


def launched_by_torchrun(command: Callable[[], object]) -> None:
    """Called on all ranks of a torchrun: rank 0 runs ``command``, the others its jobs."""
    global _store
    on_one_host = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
    if on_one_host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _store, rank, count = next(iter(rendezvous("env://", timeout=ranks.TIMEOUT)))
    _join(rank, count)
    if not on_one_host:
        _notice_lost_hosts()
    if rank:
        _follow_rank_0()
    _prctl_pr_set_pdeathsig(signal.SIGTERM)
    try:
        command()
    except SystemExit as end:
        if end.code in (0, None):  # Else torchrun ends the others, and may start all again.
            _store.set(f"job/{_jobs}", _END)
        else:
            _end_a_lost_torchrun()
        raise


def _start(count: int) -> list[BaseProcess]:
    global _store, _jobs
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    _store, _jobs = TCPStore("127.0.0.1", 0, count, is_master=True, wait_for_workers=False, timeout=ranks.TIMEOUT), 0
    started: list[BaseProcess] = [
        multiprocessing.get_context("spawn").Process(target=_started, args=(rank, count, _store.port), daemon=True)
        for rank in range(1, count)
    ]
    # A terminal sends Ctrl-C to all: without the delay a new process would end before it can ignore it.
    resource_tracker.ensure_running()  # Its start would end the delay.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    try:
        for process in started:
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        while not _store.check([f"here/{rank}" for rank in range(1, count)]):
            if any(process.exitcode is not None for process in started):
                raise LostRankError(_cause(LostRankError("A process did not start."), started))
            time.sleep(0.05)
        _join(0, count)
    except BaseException:
        _end(started)
        raise
    return started


def _end(started: Sequence[BaseProcess]) -> None:
    for process in started:
        process.kill()
        process.join()
    if dist.is_initialized():
        dist.destroy_process_group()


def _started(rank: int, count: int, port: int) -> None:
    """The main function of a process of `_start`."""
    global _store
    silence_libraries()
    _store = TCPStore("127.0.0.1", port, count, is_master=False, timeout=ranks.TIMEOUT)
    _store.set(f"here/{rank}", "")
    _join(rank, count)
    _follow_rank_0()


def _join(rank: int, count: int) -> None:
    if rank:
        _prctl_pr_set_pdeathsig(signal.SIGKILL)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=_store, rank=rank, world_size=count, timeout=ranks.TIMEOUT)


def _follow_rank_0() -> None:
    """Runs one job after the other until rank 0 ends; does not return."""
    number = 0
    try:
        while True:
            _store.wait([f"job/{number}"], timedelta(days=365))
            if _store.get(f"job/{number}") == _END:
                os._exit(0)
            number += 1
            job, config, arguments = ranks.receive_broadcast()
            job(_begin(config, arguments), **arguments)
            sharding.end()
    except Exception as error:
        fault, known = machine_fault(error), user_error(error)
        # A collective that fails for want of memory is this rank's own error.
        if isinstance(error, LostRankError) and fault is None:
            _end_a_lost_torchrun()
            os._exit(EXIT_PEER_LOST)
        with suppress(RuntimeError):  # Rank 0 may be gone.
            _store.set("failed", f"process {ranks.rank() + 1}: {fault or known or traceback.format_exc()}")
        os._exit(1)


def _begin(config: Parameters, arguments: Mapping[str, Any]) -> Parameters:
    """Prepares this rank for a job; returns the configuration with its own GPU."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.count()))
    share_cores(here, sharded=config.distributed.sharded)
    if here < ranks.count():
        _require_same_hosts([arguments.get(name) for name in ("model", "adapters", "start")])
    device = ranks.run_on_all(lambda: _own_device(resolve_device(config.model.device)))
    if config.distributed.sharded:
        sharding.begin(device)
    return config.model_copy(update={"model": config.model.model_copy(update={"device": str(device)})})


def _own_device(device: torch.device) -> torch.device:
    if device.type != "cuda":
        return device
    number, there = int(os.environ.get("LOCAL_RANK", ranks.rank())), torch.cuda.device_count()
    if number >= there:
        raise UserError(f"{socket.gethostname()} has {counted(there, 'GPU')}, but more processes: each needs one.")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def _require_same_hosts(folders: Sequence[str | Path | None]) -> None:
    """Raises UserError where code, versions or files differ: then a sample would depend on who draws it."""
    code = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(Path(__file__).parents[2].rglob("*.py"))))
    facts = {"python": platform.python_version(), "the code of visual_grpo": code.hexdigest()}
    facts |= {name: metadata.version(name) for name in _LIBRARIES}
    facts |= {f"the files of {folder}": str(content_digest(folder)) for folder in folders if folder is not None}
    hosts = ranks.all_gather(lambda: (socket.gethostname(), facts))
    first, expected = hosts[0]
    for host, found in hosts:
        if differing := [name for name in facts if found[name] != expected[name]]:
            raise UserError(
                f"{host} differs from {first}, the host of the first process: {', '.join(differing)}. Expected the"
                " same commit, packages and files, at the same path on every host, best on a shared file system."
            )


def _cause(error: LostRankError, started: Sequence[BaseProcess]) -> str:
    """Says how the lost rank ended; waits a moment for its exit code."""
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        with suppress(RuntimeError):  # torchrun's store may be gone.
            if _store.check(["failed"]):
                return str(_store.get("failed").decode())
        for rank, process in enumerate(started, 1):
            code = process.exitcode
            if code not in (None, EXIT_PEER_LOST):
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                return (
                    f"Process {rank + 1} of this command (pid {process.pid}) {how}. The usual cause is too little"
                    " memory: each process has the model (distributed.processes)."
                )
        time.sleep(0.1)
    return str(error) if started else f"{error}. How it ended is in the output of torchrun on its host."


def _end_a_lost_torchrun() -> None:
    """Kills this host's torchrun if the host of its store is gone: it would wait for minutes."""
    try:
        _store.check(["failed"])
    except RuntimeError:
        if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != 1:
            os.kill(os.getppid(), signal.SIGKILL)


def _notice_lost_hosts() -> None:
    """Has the system notice that a host is gone: gloo's connections would wait for `ranks.TIMEOUT`."""
    options = {"KEEPIDLE": 4, "KEEPINTVL": 4, "KEEPCNT": 2, "USER_TIMEOUT": 1000 * _NOTICED}
    for file in Path("/proc/self/fd").glob("*"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(file.name))) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in options.items():
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)
