"""How much the pipeline gpu_check runs."""

from __future__ import annotations

from pydantic import Field

from visual_grpo.config.base import Strict


class GpuCheckConfig(Strict):
    """Of the pipeline gpu_check, which runs steps of a training on the GPU and holds them against the plan."""

    prompts: int = Field(
        1, ge=1, description="prompts of each step, with grpo.group_size samples each; fewer than a training's"
    )
    steps: int = Field(2, ge=1, description="of each module at each size; the last one is timed")
    sizes: list[int] | None = Field(
        None,
        min_length=1,
        description="heights in pixels, the width in proportion; null = data.height, and half of it where that is at"
        " least 256",
    )
    modules: list[str] | None = Field(
        None, min_length=1, description="modules that are trained, one after the other; null = all of the model"
    )
