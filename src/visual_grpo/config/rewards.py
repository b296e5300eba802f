"""Parameters of rewards, and what in their options is secret."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from visual_grpo.common.errors import UserError
from visual_grpo.config.base import NotEmpty, Stated, Strict

_NAMES = re.compile(
    r"(^|[_.-])(secret|token|passw(or)?d|passphrase|(api|access|private|auth)[_-]?key|credentials?|auth|authorization"
    r"|bearer|cookie)($|[_.-])",
    re.IGNORECASE,
)
_IN_ADDRESS = re.compile(
    r"://[^/\s:@]*:[^/\s@]+@|[?&;](access_?|auth_?|api_?)?(token|key|sig|signature|secret|password)=", re.IGNORECASE
)
"""https://user:password@host and https://host/path?token=..."""
_VARIABLE = re.compile(r"((?:Bearer |Basic )?)\$([A-Za-z_]\w*)")
_PUBLIC_HEADERS = ("accept", "content-type", "user-agent")


def secret_options(options: Mapping[str, Any], section: str = "") -> Iterator[str]:
    """Names of the options whose text looks like a secret itself and not like the name of a variable."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from secret_options(value, name)
        elif isinstance(value, str) and value and not _VARIABLE.fullmatch(value):
            header = section.lower() in ("headers", "extra_headers") and name.lower() not in _PUBLIC_HEADERS
            if header or _NAMES.search(name) or _IN_ADDRESS.search(value):
                yield f"{section}.{name}" if section else name


def with_variables(value: Any, reward: str) -> Any:
    """Replaces each ``$NAME`` in the options by that environment variable. Raises UserError if it is not set."""
    if isinstance(value, Mapping):
        return {name: with_variables(item, reward) for name, item in value.items()}
    match = _VARIABLE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return value
    if not os.environ.get(match[2]):
        raise UserError(
            f"reward {reward!r}: an option names the variable {value}, which the environment does not have:"
            f" export {match[2]}=..."
        )
    return match[1] + os.environ[match[2]]


class RewardConfig(Strict):
    """One reward: a built-in by name or any ``package.module:function``."""

    function: NotEmpty | None = Field(None, description="package.module:function; null = the built-in of this name")
    weight: float = Field(1.0, description="0 = reported, never optimised")
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
    max_failed_share: float = Field(
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

    @field_validator("options")
    @classmethod
    def _no_secrets(cls, options: dict[str, object]) -> dict[str, object]:
        name = next(secret_options(options), None)
        if name is not None:
            raise ValueError(
                f"{name} looks like a secret, and parameters are stored with every run. Put it into a variable of the"
                f" environment and name that: {name}: $NAME"
            )
        return options
