"""How a training is repeated."""

from __future__ import annotations

from pydantic import Field

from visual_grpo.config.base import Strict


class ReproduceConfig(Strict):
    """Of the pipeline reproduce."""

    tolerance: float = Field(
        0.05,
        ge=0,
        description="largest difference of the final metrics where a GPU takes part, as a share of the run's value (of"
        " 1, where that is smaller); on a CPU every bit must be the same",
    )
    keep: bool = Field(
        False, description="keep the temporary folder with the code and all results; what does not match is always kept"
    )
