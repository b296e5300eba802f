"""When the retrain command trains, what it may spend, and whom it tells."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from visual_grpo.config.base import Strict
from visual_grpo.config.data import DataChecks


class MonitorConfig(Strict):
    """A score that somebody else measures, such as of the pictures that users get."""

    command: str | None = Field(
        None, description="a shell command whose last printed line is the score, a number; null = nothing is monitored"
    )
    floor: float = Field(0.0, description="a retraining begins when the score is below it")


class RetrainConfig(Strict):
    """Of ``python -m visual_grpo.operations.retraining`` (`make retrain`)."""

    when: Literal["changed", "always"] = Field(
        "changed",
        description="changed: where data, code, parameters or the monitored score ask for it; always: at each call,"
        " with the next training seed if nothing has changed",
    )
    start: Literal["base", "champion"] = Field("base", description="what is trained on; champion: once there is one")
    monitor: MonitorConfig = MonitorConfig()
    update: bool = Field(True, description="first fetch newer versions of what dvc import or import-url brought")
    data: DataChecks = DataChecks()
    hours: float | None = Field(
        None, gt=0, description="wall time; then it stops with a checkpoint, and the next call goes on; null = no limit"
    )
    max_steps: int | None = Field(None, ge=1, description="more grpo.steps than these are refused; null = no limit")
    keep_versions: int | None = Field(
        10,
        ge=2,
        description="newest versions of the registered model that are kept, beside those in use; null = all",
    )
    keep_runs: int | None = Field(
        None, ge=2, description="newest runs that MLflow keeps, beside those of versions that are kept; null = all"
    )
    commit: str | None = Field(None, description="a branch on which dvc.lock is committed; null = it is not")
    notify: str | None = Field(None, description="a shell command whose input is the summary, JSON; null = none")
    notify_when: Literal["always", "work", "failure"] = Field(
        "work",
        description="always; work: not where nothing was to be done; failure: where the exit code is neither 0 nor 3",
    )
