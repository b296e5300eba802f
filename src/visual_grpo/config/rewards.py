"""Parameters of rewards."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from visual_grpo.config.base import NotEmpty, Stated, Strict
from visual_grpo.config.decides import Decides


def is_loggable(name: str) -> bool:
    """Returns whether MLflow takes a metric or parameter of this name."""
    return bool(re.fullmatch(r"[\w .:/-]+", name)) and posixpath.normpath(name) == name


class RewardConfig(Strict, decides=Decides.SCORES):
    """One reward: a built-in by name or any ``package.module:function``."""

    function: NotEmpty | None = Field(None, description="package.module:function; null = the built-in of this name")
    weight: Annotated[float, Decides.TRAINING | Decides.JUDGEMENT] = Field(
        1.0, description="0 = reported, never optimised"
    )
    judge: bool = Field(
        False, description="a second opinion: scored at baseline and evaluations, never in rollouts; weight 0"
    )
    judge_of: Annotated[NotEmpty, Stated()] | None = Field(
        None, description="the optimised reward that is judged; null = the total"
    )
    options: dict[str, object] = Field(default_factory=dict, description="keyword arguments of the reward")
    frames: Literal["all", "first"] | Annotated[int, Field(ge=1)] | None = Field(
        None, description="a reward of images scores these frames of a video: all, first, or every Nth; null = no video"
    )
    over_frames: Literal["mean", "minimum"] = Field("mean", description="which of the frames' scores counts")
    clip: tuple[float | None, float | None] = Field(
        (None, None),
        description="[low, high] that scores are clamped to; null = no limit. The part raw has the unclamped scores",
    )
    only_where: dict[str, float] = Field(
        default_factory=dict,
        description="least scores of other rewards, such as {ocr: 0.9}; below them this reward counts as the worst "
        "end of clip",
    )
    max_failed_share: Annotated[float, Decides.NOTHING] = Field(
        0.05,
        ge=0,
        lt=1,
        description="largest share of samples (or one) on which the reward's code may fail; they stay unscored. An"
        " error of the first call always stops the run",
    )

    @model_validator(mode="before")
    @classmethod
    def _a_judge_has_no_weight(cls, tree: Any) -> Any:
        is_judge = isinstance(tree, Mapping) and tree.get("judge") is True
        return {"weight": 0.0, **tree} if is_judge else tree

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        if self.judge and self.weight:
            raise ValueError(
                f"a judge is never optimised, and this has the weight {self.weight:g}: leave one of them out"
            )
        if self.judge_of is not None and not self.judge:
            raise ValueError(f"judge_of is {self.judge_of}, and judge is not true: set judge: true, or leave both out")
        if self.over_frames == "minimum" and self.weight < 0:
            raise ValueError(f"over_frames is minimum, the best frame at the weight {self.weight:g}: set it to mean")
        return self
