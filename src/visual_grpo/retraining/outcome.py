"""How a retraining ended: its exit code, the summary that is printed and stored, and who is told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any

from visual_grpo.config import RetrainConfig
from visual_grpo.programs import ProgramError, output_of

SECONDS = 60.0
"""Time of a notification."""


class Code(IntEnum):
    """Exit codes of ``python -m visual_grpo.retraining``; 128 + N where the signal N stopped it."""

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


@dataclass(kw_only=True)
class Outcome:
    """The result of a retraining."""

    code: int
    sentence: str
    model: str
    """Registered model."""
    reason: str | None = None
    """Why something was done; None = there was nothing to do."""
    version: int | None = None
    """The version that was promoted."""
    run_id: str | None = None
    """The MLflow run of the candidate's training."""
    seconds: float = 0.0
    removed: list[str] = field(default_factory=list)
    """Versions and runs that were deleted."""
    commit: str | None = None
    """The commit with dvc.lock."""
    warning: str | None = None
    """A failure after the decision, which stands."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"outcome": Code(self.code).name.lower() if self.code in set(Code) else "stopped"}

    @property
    def line(self) -> str:
        """The summary in one line."""
        took = timedelta(seconds=round(self.seconds))
        return f"Retraining of {self.model}: {self.sentence} ({took}, exit code {self.code})"


def notify(settings: RetrainConfig, summary: Mapping[str, Any], project: Path) -> str | None:
    """Gives the summary to ``retrain.notify`` if it is due; returns what went wrong, or None."""
    if settings.notify is None or not is_due(settings, summary):
        return None
    text = json.dumps(summary, ensure_ascii=False)
    try:
        output_of("/bin/sh", "-c", settings.notify, at=project, given=text, seconds=SECONDS)
    except ProgramError as error:
        return f"The command of retrain.notify failed: {error}"
    return None


def is_due(settings: RetrainConfig, summary: Mapping[str, Any]) -> bool:
    """Returns whether ``retrain.notify_when`` asks for this outcome."""
    failed = summary["code"] not in (Code.DONE, Code.NOT_PROMOTED)
    if settings.notify_when == "failure":
        return failed
    return failed or settings.notify_when == "always" or summary["reason"] is not None
