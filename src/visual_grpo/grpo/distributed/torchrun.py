"""Runs ``kedro run`` again under torchrun's agent, as several ranks on this machine.

Torchrun's own stores listen on every address, and its agent unpickles what it finds there. Here the agent's store is in
memory, and the ranks' is a file in a folder that only this user can enter.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from visual_grpo.common.errors import LostRankError, UserError
from visual_grpo.common.processes import STORE, TERMINATING

_ALONE = "one machine"


class _AloneHandler(RendezvousHandler):
    """The rendezvous of the only agent, which waits for nobody."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        nowhere = RendezvousStoreInfo("", 0)  # The ranks find each other by `STORE`.
        return RendezvousInfo(HashStore(), rank=0, world_size=1, bootstrap_store_info=nowhere)

    def get_backend(self) -> str:
        return _ALONE

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def rerun(processes: int) -> NoReturn:
    """Runs this command as that many ranks, and waits for them; only rank 0's output is shown.

    Raises:
        SystemExit: all have ended; the code is rank 0's, or 128 + the number of the signal that stopped this process.
        LostRankError: another rank failed, or one was killed.
        UserError: this process is not ``kedro run``.
    """
    called = Path(sys.argv[0])
    if "kedro" not in (called.name, called.parent.name):
        raise UserError(
            f"distributed.processes is {processes}, but a session in Python cannot be started again. Expected 1."
        )
    # Under nohup, SIGHUP stays ignored.
    signals = [one.name for one in (signal.SIGINT, *TERMINATING) if signal.getsignal(one) != signal.SIG_IGN]
    logging.disable()  # Hides torchrun's long report of a failure.
    rendezvous_handler_registry.register(_ALONE, _AloneHandler)
    with TemporaryDirectory() as folder:  # Of mode 0700.
        os.environ[STORE] = f"{folder}/ranks"
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=secrets.token_hex(),  # By which the ranks recognise each other.
            rdzv_backend=_ALONE,
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(folder, redirects=dict.fromkeys(range(1, processes), Std.ALL)),
            signals_to_handle=",".join(signals),
            shutdown_timeout=10**7,  # Seconds. Rank 0 finishes its step.
        )
        try:
            elastic_launch(config, sys.executable)(*sys.orig_argv[1:])
        except SignalException as stop:
            sys.exit(128 + stop.sigval)
        except ChildFailedError as failed:
            _report(failed, Path(folder))
    sys.exit()


def _report(failed: ChildFailedError, logs: Path) -> NoReturn:
    """Raises LostRankError with how the first failed rank ended; exits as rank 0 did, which has told its own error."""
    rank, failure = failed.get_first_failure()
    if rank == 0 and failure.exitcode > 0:
        sys.exit(failure.exitcode)
    for file in logs.glob(f"*/*/{rank}/stderr.log"):
        sys.stderr.write(file.read_text(encoding="utf-8", errors="replace"))
    how = f"ended with exit code {failure.exitcode}."
    if failure.exitcode < 0:
        how = f"terminated with signal {failure.signal_name()}."
        if failure.signal_name() == "SIGKILL":
            how += " The system sends it if memory runs out: each process has the model (distributed.processes)."
    raise LostRankError(f"Process {rank + 1} of this command (pid {failure.pid}) {how}")
