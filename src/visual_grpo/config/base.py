"""What every section of the parameters shares: the strict base class and the types of several sections."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

AdapterName = Annotated[str, BeforeValidator(lambda name: str(name) if isinstance(name, int) else name)]
"""latest, a folder, an MLflow run, a version of a registered model, or none. The beginning of a run's id that has only
digits is a number on the command line."""
Side = Annotated[int, Field(ge=32, le=4096, multiple_of=32, description="pixels, a multiple of 32")]
Share = Annotated[float, Field(ge=0, lt=1)]
World = Literal["shapes", "words", "scenes"]
Dtype = Literal["float32", "bfloat16", "float16"]
Task = Literal["t2i", "i2i", "mixed", "segmentation"]


class Strict(BaseModel):
    """Immutable; an unknown key and a number that is not finite are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
