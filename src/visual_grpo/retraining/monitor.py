"""A score that somebody else measures, below which a retraining begins (``retrain.monitor``)."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

from visual_grpo.config import MonitorConfig
from visual_grpo.errors import UserError
from visual_grpo.retraining.commands import shell

SECONDS = 600.0


def fallen_score(monitor: MonitorConfig, project: Path) -> float | None:
    """The score if it is below the floor, else None.

    Raises:
        UserError: the command failed, or its last line is no number.
    """
    if monitor.command is None:
        return None
    try:
        done = shell(monitor.command, project, seconds=SECONDS)
    except subprocess.TimeoutExpired:
        raise UserError(f"retrain.monitor.command did not end within {SECONDS:g} s: {monitor.command}") from None
    if done.returncode:
        raise UserError(
            f"retrain.monitor.command ended with exit code {done.returncode}: {monitor.command}\n{done.stderr.strip()}"
        )
    score = _number(done.stdout)
    if score is None:
        last = done.stdout.strip().splitlines()[-1:] or ["nothing"]
        raise UserError(
            f"retrain.monitor.command must print a number as its last line, but printed {last[0]!r}: {monitor.command}"
        )
    return score if score < monitor.floor else None


def _number(text: str) -> float | None:
    try:
        score = float(text.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return None
    return None if math.isnan(score) else score
