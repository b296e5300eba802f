"""Seconds and memory of the phases of a step on a GPU, told apart as a plan tells them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from visual_grpo.plan.meter import OUTSIDE


@dataclass(kw_only=True)
class Measured:
    """What a phase took in all."""

    seconds: float = 0.0
    peak: int = 0
    """Bytes of all tensors at once."""


class Stopwatch:
    """Has `phase` as `plan.meter.Meter` has: within another phase what happens belongs to this one alone."""

    def __init__(self, device: torch.device) -> None:
        """``device``: cuda; on a CPU, where memory is not measured, the peaks are 0."""
        self._device = device
        self.phases: dict[str, Measured] = {}
        self._path = [OUTSIDE]
        self._since = self._now()

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases.values())

    @property
    def peak(self) -> int:
        return max((phase.peak for phase in self.phases.values()), default=0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.stop()
        self._path.append(name)
        try:
            yield
        finally:
            self.stop()
            self._path.pop()

    def stop(self) -> None:
        """Books what happened since the last call on the phase that it happened in."""
        now = self._now()
        row = self.phases.setdefault(self._path[-1], Measured())
        row.seconds += now - self._since
        if self._device.type == "cuda":
            row.peak = max(row.peak, torch.cuda.max_memory_allocated(self._device))
            torch.cuda.reset_peak_memory_stats(self._device)
        self._since = now

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
