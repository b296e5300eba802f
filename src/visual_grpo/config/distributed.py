"""Several processes that train together."""

from __future__ import annotations

from pydantic import Field

from visual_grpo.config.base import Strict


class DistributedConfig(Strict):
    processes: int = Field(
        1,
        ge=1,
        description="that train together, each with the whole model, and each on another GPU where model.device is"
        " cuda; on this machine, or those that torchrun has started on several; each draws and replays whole groups, so"
        " at most grpo.prompts_per_step",
    )
