"""Tasks for `side_by_side`: functions that another process can import."""

from __future__ import annotations

import os
import time
from pathlib import Path

from visual_grpo.starter.job import Advance


def count(name: str, steps: int, advance: Advance) -> None:
    for step in range(steps):
        advance(name, step + 1)


def tell_pid_and_go_on(file: Path, advance: Advance) -> None:
    file.write_text(str(os.getpid()))
    for step in range(10**6):
        advance("endless", step)
        time.sleep(0.02)


def fail(advance: Advance) -> None:
    raise ValueError("the ink has run out")


def die(advance: Advance) -> None:
    os._exit(9)
