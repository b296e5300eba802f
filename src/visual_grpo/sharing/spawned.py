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
    """Delays signals in this process and in one that is started inside the block.

    A terminal sends Ctrl-C to every process. Without the delay it would stop the new process with a traceback before
    that one can ignore signals. This process receives its signals when the block ends.
    """
    resource_tracker.ensure_running()  # Its start would end the delay, so it must run before.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
