"""Exit codes of a retraining, and who is told how it ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from visual_grpo.common.processes import ProgramError, output_of
from visual_grpo.config import RetrainConfig

_SECONDS = 60.0
"""Time of a notification."""


class Code(IntEnum):
    """Exit codes of ``python -m visual_grpo.operations.retraining``; 128 + N where the signal N stopped it."""

    DONE = 0
    """Promoted, or nothing to do."""
    FAILED = 1
    NOT_PROMOTED = 3
    """Trained, but not shown to be better than the champion and the base model."""
    BUSY = 4
    """Another retraining of the same results is running."""
    OUT_OF_TIME = 5
    """``retrain.hours`` are over; the next call goes on from the checkpoint."""
    DATA_REFUSED = 6
    """The data are too few, too damaged or too unlike the champion's; nothing was trained."""


class DataRefusedError(Exception):
    """The prepared records did not pass the checks of ``retrain.data``."""


def notify(settings: RetrainConfig, summary: Mapping[str, Any], project: Path) -> str | None:
    """Gives the summary to ``retrain.notify`` if it is due; returns what went wrong, or None."""
    if settings.notify is None or not is_due(settings, summary):
        return None
    text = json.dumps(summary, ensure_ascii=False)
    try:
        output_of("/bin/sh", "-c", settings.notify, at=project, stdin=text, seconds=_SECONDS)
    except ProgramError as error:
        return f"The command of retrain.notify failed: {error}"
    return None


def is_due(settings: RetrainConfig, summary: Mapping[str, Any]) -> bool:
    """Returns whether ``retrain.notify_when`` asks for this outcome."""
    failed = summary["code"] not in (Code.DONE, Code.NOT_PROMOTED)
    if settings.notify_when == "failure":
        return failed
    return failed or settings.notify_when == "always" or summary["reason"] is not None
