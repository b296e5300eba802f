"""A process on this machine that the first one starts, and ends."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Mapping
from typing import Any

from visual_grpo.sharing.frames import Channel
from visual_grpo.sharing.worker import Build, work

_SPAWN = multiprocessing.get_context("spawn")


class Spawned:
    """Satisfies ``workers.Process``."""

    def __init__(self, number: int, count: int, build: Build, arguments: Mapping[str, Any]) -> None:
        """The ``number``-th of ``count``."""
        ours, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(
            target=work, args=(theirs, count, build, dict(arguments)), name=f"training {number}", daemon=True
        )
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
