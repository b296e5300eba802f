"""What a process does that has joined the first one: it works for one training after another, and ends with it."""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection

from visual_grpo.sharing.crew import CLOSED
from visual_grpo.sharing.frames import Loan, TrainingEnded, receive_json
from visual_grpo.sharing.worker import IGNORED, Build, work

_LOOK = 1000
"""Milliseconds between two looks at whether the launcher is there."""
_GRACE = 5.0
"""Seconds that a process may take to see by itself that the first one is gone; it may be in the middle of a rollout."""


def serve(connection: Connection, builds: Mapping[str, Build], *, here: int, name: str) -> int:
    """Does what the first process asks for, until that ends.

    Args:
        builds: the functions that it may name; each is called with the JSON that it sends.
        here: processes on this machine.
        name: of this process, for what it has to say.

    Returns:
        The exit code: 0 where the first process has done all it was asked for.
    """
    for stop in IGNORED:
        signal.signal(stop, signal.SIG_IGN)
    done = threading.Event()
    watch = threading.Thread(target=_end_with_the_others, args=(connection, done), name="watch", daemon=True)
    watch.start()
    while True:
        try:
            asked = receive_json(connection)
            if "end" in asked:
                done.set()
                return int(asked["end"])
            _train(_Lent(connection, name), builds[asked["build"]], asked["arguments"], here)
            connection.send_bytes(b"")
        except (EOFError, OSError):
            done.set()
            _tell_lost(name)
            return 1


def _train(loan: Loan, build: Build, arguments: Mapping[str, object], here: int) -> None:
    """One training, or one baseline or evaluation; nothing of it is left in memory."""
    try:
        work(loan, here, build, arguments)
        loan.skip()  # It could not be built, of which the first process knows.
    except TrainingEnded:
        pass
    gc.collect()
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class _Lent(Loan):
    """`worker.work` ends the process without a word where the connection is lost."""

    def __init__(self, connection: Connection, name: str) -> None:
        super().__init__(connection)
        self._name = name

    def recv_bytes(self) -> bytes:
        try:
            return super().recv_bytes()
        except (EOFError, OSError):
            _tell_lost(self._name)
            raise


def _tell_lost(name: str) -> None:
    print(f"{name}: the connection to the first process is lost; what it says is the reason.", file=sys.stderr)  # noqa: T201


def _end_with_the_others(connection: Connection, done: threading.Event) -> None:
    """Ends this process at once with its launcher, and soon after the first process, whatever it computes."""
    launcher, poll = os.getppid(), select.poll()
    poll.register(connection.fileno(), CLOSED)
    while not poll.poll(_LOOK):
        if os.getppid() != launcher:
            os._exit(1)
    if not done.wait(_GRACE):
        os._exit(1)
