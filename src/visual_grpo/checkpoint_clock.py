"""When a checkpoint is due by the clock, and how long writing them takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CheckpointClock:
    """Of one training run; a clock that is set forward or back changes nothing."""

    def __init__(self, minutes: float, now: Callable[[], float] = time.monotonic) -> None:
        """``minutes`` between two checkpoints; 0 = none is due by the clock."""
        self._interval, self._now = 60 * minutes, now
        self._saved = self._step_began = now()
        self._spent = 0.0

    def step_begins(self) -> None:
        self._step_began = self._now()

    def due(self) -> bool:
        """At the end of a step: whether so much time has passed since the last checkpoint."""
        return self._passed_since(self._saved)

    def due_within_step(self) -> bool:
        """Between two updates: whether the step itself has been taking so much time, since there the checkpoint is
        larger, by the whole rollout."""
        return self._passed_since(max(self._saved, self._step_began))

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around the writing of a checkpoint."""
        began = self._now()
        try:
            yield
        finally:
            self._saved = self._now()
            self._spent += self._saved - began

    def take_seconds(self) -> float:
        """Seconds spent on checkpoints since the last call."""
        spent, self._spent = self._spent, 0.0
        return spent

    def _passed_since(self, moment: float) -> bool:
        return self._interval > 0 and self._now() - moment >= self._interval
