"""What all parts share: the machine that they run on, the rows that they record, seconds and memory of a call."""

from __future__ import annotations

import fcntl
import gc
import json
import math
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Timer

from visual_grpo.models.lora_layers import lora_layers


@dataclass(frozen=True, kw_only=True)
class Machine:
    device: str
    tiny: bool
    """Small models in the place of the released ones, to try all of this on a CPU."""
    work: Path
    """Scratch folder of this process."""
    out: Path
    """Folder of the results, for what is more than numbers."""
    until: float
    """``time.monotonic()`` at which the part is killed; processes of one machine have one clock."""
    plans: dict[str, Any]
    """What prepare.py planned, by the model's name."""
    card: dict[str, float]
    """What the part ``facts`` measured."""

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")

    def left(self) -> float:
        """Seconds until the part is killed."""
        return self.until - time.monotonic()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Waits until no other process times a step, and keeps them from it inside."""
        with (self.work.parent / "turn").open("w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)  # Released when the file is closed.
            yield


class Recorder:
    """Appends rows to a file at once: what was measured survives a kill."""

    def __init__(self, part: str, file: Path) -> None:
        self._part, self._file = part, file

    def add(self, table: str, **columns: Any) -> None:
        row = json.dumps({"part": self._part, "table": table} | {key: _plain(value) for key, value in columns.items()})
        with self._file.open("a", encoding="utf-8") as out:
            out.write(row + "\n")
        print(row, flush=True)

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Records an error of the block, and goes on behind it."""
        try:
            yield
        except Exception as error:  # Whatever it is, the others are measured.
            print(traceback.format_exc(), flush=True)
            self.add("errors", what=what, error=f"{type(error).__name__}: {error}"[:700])
        finally:
            gc.collect()
            torch.cuda.empty_cache()


def _plain(value: Any) -> Any:
    """A value as JSON, which has no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if isinstance(value, int | str | None) else str(value)


def seconds_of(work: Callable[[], Any]) -> float:
    """Median wall seconds of a call after a warm-up, with the device waited for before and after."""
    work()
    return float(Timer("work()", globals={"work": work}).blocked_autorange(min_run_time=0.3).median)


@contextmanager
def peft_lora(network: Any) -> Iterator[None]:
    """LoRA layers compute as peft has them: in the precision of A and B, float32, unless autocast is on."""
    forwards = [(layer, layer.__dict__.pop("forward")) for layer in lora_layers(network) if "forward" in vars(layer)]
    try:
        yield
    finally:
        for layer, forward in forwards:
            layer.forward = forward


def timed(machine: Machine, work: Callable[[], Any]) -> tuple[float, float | None]:
    """Wall seconds of one call, and its peak memory in 10^9 bytes; None on a CPU."""
    if machine.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    work()
    if machine.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return seconds, torch.cuda.max_memory_allocated() / 1e9 if machine.is_cuda else None
