"""What the promotion gate asks for, and the registered model that adapters are promoted in."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Annotated

from pydantic import Field, field_validator

from visual_grpo.config.base import AdapterName, Strict
from visual_grpo.config.outputs import ROOT

PACKAGE = "visual_grpo"
CHAMPION = "champion"


class GateRule(Strict):
    """What a candidate must show, against each reference (`evaluation.gate`)."""

    gates_per_year: int = Field(
        52,
        ge=1,
        description="promotions that may be asked for in 365 days, each with an equal part of error; more are refused",
    )
    error: float = Field(
        0.05,
        gt=0,
        lt=0.5,
        description="probability that a year of gates promotes an adapter that is not better",
    )
    margin: float = Field(0.0, ge=0, description="gain in total reward to be shown over the champion and the base")
    max_guard_fall: float = Field(
        0.25, ge=0, description="most that a reward of weight 0 may fall, as a share of its mean before"
    )
    max_unscored_rise: float = Field(
        0.02, ge=0, le=1, description="most that the share of samples that cannot be scored may rise"
    )
    subgroups: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict,
        description="key of the records' metadata: most that the total may fall among records of the same value",
    )

    @property
    def alpha(self) -> float:
        """One-sided level of every bound of one gate."""
        return self.error / self.gates_per_year


class PromotionConfig(GateRule):
    """Which adapter is the champion: a version of a registered model in MLflow, to which an alias points."""

    model: str | None = Field(
        None,
        description="name of the registered model in MLflow; null = visual_grpo, or visual_grpo-NAME for an output"
        " folder data/NAME",
    )
    alias: str = Field(CHAMPION, description="the alias that a promotion moves: models:/NAME@champion is the champion")
    candidate: AdapterName = Field("latest", description="the adapter that asks to become champion")
    max_prompts: int | None = Field(None, ge=2, description="at most so many held-out prompts are judged; null = all")
    new_reward: bool = Field(
        False, description="allow a candidate trained with another reward; both are then judged by the candidate's"
    )
    rolled_back: bool = Field(False, description="allow adapters whose promotion was rolled back")
    base_copy_mb: float = Field(
        200, ge=0, description="largest local base model (MB) that is copied into a version; else path and digest"
    )

    @field_validator("model")
    @classmethod
    def _is_a_name(cls, model: str | None) -> str | None:
        if model is not None and (not model.strip() or set("/:") & set(model)):
            raise ValueError(f"expected the name of a registered model, without / and :, got {model!r}")
        return model

    @field_validator("alias")
    @classmethod
    def _is_an_alias(cls, alias: str) -> str:
        """MLflow reserves ``latest``, and what reads as a version."""
        if not re.fullmatch(r"[A-Za-z0-9_-]+", alias) or re.fullmatch(r"(?i)latest|v\d+", alias):
            raise ValueError(f"expected letters, digits, _ and -, and neither latest nor v1, v2, ..., got {alias!r}")
        return alias

    def name(self, output: str) -> str:
        """The registered model's name for the results in the folder ``output``."""
        return self.model or "-".join([PACKAGE, *_words(PurePath(output))])


def _words(output: PurePath) -> list[str]:
    """The folders that tell ``output`` apart, as MLflow allows them in a name."""
    inside = output.relative_to(ROOT) if output.is_relative_to(ROOT) else output
    return [word for part in inside.parts if (word := re.sub(r"[^\w.-]+", "_", part).strip("_"))]
