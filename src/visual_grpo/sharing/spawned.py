"""A process on this machine that the first one starts, and ends."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

from visual_grpo.sharing.frames import Channel
from visual_grpo.sharing.worker import IGNORED, Build, work

_SPAWN = multiprocessing.get_context("spawn")


class Spawned:
    """Satisfies ``workers.Process``."""

    def __init__(self, number: int, count: int, build: Build, arguments: Mapping[str, Any]) -> None:
        """The ``number``-th of ``count``."""
        ours, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(
            target=work, args=(theirs, count, build, dict(arguments)), name=f"training {number}", daemon=True
        )
        with _signals_held_back():
            self._process.start()
        theirs.close()
        self.channel: Channel = ours

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def where(self) -> str:
        return f"pid {self.pid}"

    def end(self) -> None:
        self.channel.close()

    def kill_after(self, deadline: float) -> None:
        self._process.join(max(0.0, deadline - time.monotonic()))
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def exit_code(self, seconds: float) -> int | None:
        self._process.join(seconds)
        return self._process.exitcode

    def how_it_ended(self, seconds: float) -> str:
        code = self.exit_code(seconds)
        if code is None:
            return "hangs"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """What a process that starts meanwhile inherits: a terminal sends Ctrl-C to all, and until it has come so far as to
    ignore that, it would end with a traceback of its own. This process gets at the end what came meanwhile."""
    resource_tracker.ensure_running()  # Where it starts, it lets through what is held back.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
