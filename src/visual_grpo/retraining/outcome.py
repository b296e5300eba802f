"""How a retraining ended: its exit code, and the summary that is printed, stored and sent."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any


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


class OutOfTimeError(Exception):
    """``retrain.hours`` are over."""


class DataRefusedError(Exception):
    """The prepared records did not pass the checks of ``retrain.data``."""


class StageFailedError(Exception):
    """A command that the retraining called ended with an error, which it has printed."""


@dataclass(kw_only=True)
class Outcome:
    """What became of a retraining."""

    code: int
    sentence: str
    """One line for people."""
    reason: str | None = None
    """Why something was to be done: what changed, the schedule, the monitored score; None = nothing was."""
    model: str
    """Registered model."""
    version: int | None = None
    """The version that was promoted."""
    run_id: str | None = None
    """The MLflow run of the candidate's training."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Stage -> wall time."""
    removed: list[str] = field(default_factory=list)
    """Versions and runs that were deleted, by ``retrain.keep_versions`` and ``keep_runs``."""
    commit: str | None = None
    """The commit with dvc.lock, where one was made."""
    warning: str | None = None
    """What could not be tidied up afterwards; the decision stands."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"outcome": Code(self.code).name.lower() if self.code in set(Code) else "stopped"}

    @property
    def line(self) -> str:
        """The summary in one line."""
        total = sum(self.seconds.values())
        return f"Retraining of {self.model}: {self.sentence} ({_duration(total)}, exit code {self.code})"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{hours} h" if hours else "", f"{minutes} min" if minutes else "", f"{rest} s" if not hours else ""]
    return " ".join(part for part in parts if part)
