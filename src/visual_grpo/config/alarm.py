"""When a training is taken to cheat its reward, and what happens then."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from visual_grpo.config.base import Strict

Positive = Annotated[float, Field(gt=0)]


class AlarmConfig(Strict):
    """Of the comparison with the base model at every evaluation of a training."""

    action: Literal["warn", "stop", "rollback"] = Field(
        "warn",
        description="what an alarm does; warn: a line, a tag and a picture; stop: the training also ends; rollback: and"
        " its adapter is the best of the evaluations before the first alarm at which no signal was beyond its limit (if"
        " there was none, the one at which the worst signal was least beyond it)",
    )
    error: float = Field(
        0.05, gt=0, lt=0.5, description="probability of an alarm in a training in which nothing exceeds its limit"
    )
    max_guard_fall: Positive = Field(
        0.25, description="of each guard (a reward of weight 0), as a share of the base model's mean"
    )
    max_unscored_rise: float = Field(0.05, ge=0, lt=1, description="of the share of samples that cannot be scored")
    max_distance: Positive | None = Field(
        None,
        description="from the base model's pictures: root mean square of the differences of pixels in [0, 1], after"
        " reduction to 64 pixels a side; null = it is only reported",
    )
