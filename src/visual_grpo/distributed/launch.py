"""Starts the other ranks of a command on this machine, or takes those that torchrun has started on several."""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from visual_grpo.config import Parameters
from visual_grpo.distributed import group
from visual_grpo.errors import LostRankError, UserError, counted, user_error
from visual_grpo.faults import machine_fault
from visual_grpo.hardware import shards
from visual_grpo.hardware.device import resolve_device
from visual_grpo.hardware.parallel import share_cores
from visual_grpo.saved_model import content_digest
from visual_grpo.third_party_output import silence_libraries

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Rank 0 decides what becomes of a run."""
BEREFT = 2
"""Exit code of a rank that ends as another one is gone."""
_LIBRARIES = ("torch", "transformers", "diffusers", "peft", "tokenizers", "safetensors")
_MOMENT = 5.0
"""Seconds that the cause of a loss may take to show."""

_store: Any = None
"""Tells the ranks that a job has begun, and rank 0 why one has failed."""
_jobs = 0


@contextmanager
def ranks(config: Parameters, job: Callable[..., None], **arguments: Any) -> Iterator[None]:
    """On rank 0: meanwhile the others run ``job(config, **arguments)``, each with the configuration of its own GPU.

    Raises:
        UserError: the machine has too few GPUs, the hosts differ, or an error of any rank.
        LostRankError: a rank has ended; says how, where that is known.
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
        group.from_first(lambda: (job, config, arguments))
        _begin(config, [arguments.get("model"), arguments.get("adapters"), arguments.get("start")])
        yield
    except LostRankError as error:
        raise LostRankError(_cause(error, started)) from error
    finally:
        shards.end()
        share_cores(1)
        if not launched:
            _end(started)


def serve() -> None:
    """On the other ranks: runs one job after the other until rank 0 ends; never returns."""
    number = 0
    try:
        while True:
            while not _store.check([f"job/{number}"]):
                time.sleep(0.1)
            number += 1
            job, config, arguments = _told()
            if job is None:
                os._exit(0)
            own = _begin(config, [arguments.get("model"), arguments.get("adapters"), arguments.get("start")])
            job(own, **arguments)
            shards.end()
    except Exception as error:
        # Out of memory within a collective is this rank's own error, though the collective fails by it.
        if isinstance(error, LostRankError) and machine_fault(error) is None:
            os._exit(BEREFT)
        known = user_error(error)
        said = machine_fault(error) or (str(known) if known else traceback.format_exc())
        with suppress(RuntimeError):  # Rank 0 may be gone.
            _store.set("failed", f"process {group.rank() + 1}: {said}")
        os._exit(1)


def _told() -> Any:
    return group.from_first(lambda: None)


def launch_with_torchrun(command: Callable[[], object]) -> None:
    """Rank 0 runs ``command``, the others serve; all ranks of a torchrun call this."""
    global _store
    on_one_host = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
    if on_one_host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if dist.is_available() and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    from torch.distributed.rendezvous import rendezvous

    _store, rank, count = next(iter(rendezvous("env://", timeout=group.TIMEOUT)))
    # A job may be hours away, and begins within a collective's timeout: until then the others look at the store.
    dist.init_process_group(_backend(), store=_store, rank=rank, world_size=count, timeout=group.TIMEOUT)
    if not on_one_host:
        _notice_lost_hosts()
    if rank:
        _ignore_signals()
        _end_with_parent(lambda: os._exit(BEREFT), after=20)  # Rank 0 may be saving the step.
        serve()
    _end_with_parent(lambda: os.kill(os.getpid(), signal.SIGTERM))
    command()


def dismiss() -> None:
    """On rank 0 of a torchrun, whose command has succeeded: the others end."""
    _store.set(f"job/{_jobs}", "")
    group.from_first(lambda: (None, None, None))


def _start(count: int) -> list[BaseProcess]:
    global _store, _jobs
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    _store = TCPStore("127.0.0.1", 0, count, is_master=True, wait_for_workers=False, timeout=group.TIMEOUT)
    _jobs = 0
    spawn = multiprocessing.get_context("spawn")
    started: list[BaseProcess] = [
        spawn.Process(target=_join, args=(rank, count, _store.port), name=f"rank {rank}", daemon=True)
        for rank in range(1, count)
    ]
    # A terminal sends Ctrl-C to all: without the delay a new process would end before it can ignore it.
    resource_tracker.ensure_running()  # Its start would end the delay.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
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
        dist.init_process_group(_backend(), store=_store, rank=0, world_size=count, timeout=group.TIMEOUT)
    except BaseException:
        _end(started)
        raise
    return started


def _join(rank: int, count: int, port: int) -> None:
    """The main function of a rank that `_start` has started."""
    global _store
    _ignore_signals()
    _end_with_parent(lambda: os._exit(BEREFT))
    silence_libraries()
    _store = TCPStore("127.0.0.1", port, count, is_master=False, timeout=group.TIMEOUT)
    _store.set(f"here/{rank}", "")
    dist.init_process_group(_backend(), store=_store, rank=rank, world_size=count, timeout=group.TIMEOUT)
    serve()


def _end(started: Sequence[BaseProcess]) -> None:
    for process in started:
        process.kill()
    for process in started:
        process.join()
    if dist.is_initialized():
        dist.destroy_process_group()


def _begin(config: Parameters, folders: Sequence[str | Path | None]) -> Parameters:
    """Prepares this rank for a job; returns the configuration with its own GPU."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", group.count()))
    share_cores(here)
    if str(Path.cwd()) not in sys.path:  # The user's own family of models is a file there.
        sys.path.append(str(Path.cwd()))
    if here < group.count():
        _require_same_hosts(folders)
    device = group.together(lambda: _own_device(resolve_device(config.model.device)))
    if config.distributed.sharded:
        shards.begin(device)
    if device.type == "cpu":
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"device": str(device)})})


def _own_device(device: torch.device) -> torch.device:
    if device.type != "cuda":
        return device
    number, there = int(os.environ.get("LOCAL_RANK", group.rank())), torch.cuda.device_count()
    if number >= there:
        raise UserError(
            f"{socket.gethostname()} has {counted(there, 'GPU')}, but more processes: each needs one. Expected"
            " --nproc-per-node of at most the number of GPUs."
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def _require_same_hosts(folders: Sequence[str | Path | None]) -> None:
    """Raises UserError where code, versions or files differ: then a sample would depend on who draws it."""
    code = Path(__file__).parents[1]
    facts = {"python": platform.python_version()} | {name: _version(name) for name in _LIBRARIES}
    facts["the code of visual_grpo"] = str(sorted((str(f), f.stat().st_size) for f in code.rglob("*.py")))
    facts |= {f"the files of {folder}": str(content_digest(folder)) for folder in folders if folder is not None}
    first, *others = group.everyone(lambda: (socket.gethostname(), facts))
    for host, own in others:
        differing = [name for name in facts if own[name] != first[1][name]]
        if differing:
            raise UserError(
                f"{host} differs from {first[0]}, the host of the first process: {', '.join(differing)}. Expected the"
                " same commit, packages and files, at the same path on every host, best on a shared file system."
            )


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "none"


def _cause(error: LostRankError, started: Sequence[BaseProcess]) -> str:
    """How the rank ended that was lost."""
    deadline = time.monotonic() + _MOMENT
    while time.monotonic() < deadline:
        with suppress(RuntimeError):  # torchrun's store may be gone.
            if _store.check(["failed"]):
                return str(_store.get("failed").decode())
        for rank, process in enumerate(started, 1):
            code = process.exitcode
            if code is not None and code != BEREFT:
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                return (
                    f"Process {rank + 1} of this command (pid {process.pid}) {how}. The usual cause is too little"
                    " memory: each process has the model (distributed.processes)."
                )
        time.sleep(0.1)
    if started:
        return str(error)
    return f"{error}. How it ended is in the output of torchrun on its host."


def _ignore_signals() -> None:
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)


def _end_with_parent(end: Callable[[], object], after: float = 0.0) -> None:
    """Calls ``end``, ``after`` seconds, when the process that started this one is gone, however that ended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        time.sleep(after)
        end()

    threading.Thread(target=watch, name="watch of the parent", daemon=True).start()


def _notice_lost_hosts() -> None:
    """Has the system notice within 20 s that a host is gone: gloo's connections would wait for `group.TIMEOUT`."""
    options = {"KEEPIDLE": 5, "KEEPINTVL": 5, "KEEPCNT": 3, "USER_TIMEOUT": 20_000}
    for file in Path("/proc/self/fd").glob("*"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(file.name))) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in options.items():
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
