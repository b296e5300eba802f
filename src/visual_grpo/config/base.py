"""The strict base class of all parameter sections, and the types that several share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from visual_grpo.config.decides import Decides


@dataclass(frozen=True)
class Stated:
    """Mark on a type of texts: texts that match say no more than a word does, so a stranger's provenance may have them.

    Every other text of a provenance may name code, an address, a file or a variable (`config.stated`).
    """

    pattern: str = r"(?s).*"


REACHES = "reaches"
"""Mark on a type other than text: any value but null and false opens something, as a text may."""
Words = Annotated[str, Stated()]
"""A prompt, or a name that is only compared with names: no command opens or loads it."""
BuiltIn = Annotated[str, Field(min_length=1), Stated(r"\w+")]
"""The name of something built in, or ``package.module:NAME``, which is code."""
Name = Annotated[str, BeforeValidator(lambda name: str(name) if type(name) is int else name)]
"""One that has only digits is a number in a file of parameters."""
AdapterName = Name
"""latest, a folder, an MLflow run or the beginning of its id, a version of a registered model, or none."""
NotEmpty = Annotated[str, Field(min_length=1)]
Side = Annotated[int, Field(ge=32, le=4096, multiple_of=32, description="pixels, a multiple of 32")]
Share = Annotated[float, Field(ge=0, lt=1)]
Dtype = Literal["float32", "bfloat16", "float16"]
Task = Literal["t2i", "i2i", "mixed", "segmentation"]


class Strict(BaseModel):
    """Immutable; an unknown key, a number that is not finite and true or false for a number are errors.

    Sections that scripts construct name ``default=``: type checkers do not see a positional one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    decides: ClassVar[Decides | None] = None
    """Default for fields that declare nothing themselves; None = the outer section's."""

    def __init_subclass__(cls, *, decides: Decides | None = None, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        if decides is not None:
            cls.decides = decides

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_no_switches(cls, value: Any, info: ValidationInfo) -> Any:
        """Python, and pydantic with it, would read true as 1."""
        if not _takes_numbers(cls, str(info.field_name)):
            return value
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        if any(isinstance(part, bool) for part in parts):
            raise ValueError("should be a number, not true or false")
        return value


class OnRequest(Strict, decides=Decides.NOTHING):
    """A section of a pipeline outside the data flow: no result of the flow depends on it."""


@cache
def _takes_numbers(section: type[BaseModel], field: str) -> bool:
    """Returns whether the field takes numbers, also within a list or mapping, and neither true nor false."""
    types = types_of(section.model_fields[field].annotation)
    return bool(types & {int, float}) and bool not in types


def types_of(annotation: Any) -> set[Any]:
    """Returns the types in an annotation: {int, None} for ``int | None``."""
    inner = get_args(annotation)
    return set().union(*map(types_of, inner)) if inner else {annotation}
