"""Several processes that train together."""

from __future__ import annotations

import os
from typing import Any, Self

from pydantic import Field, model_validator

from visual_grpo.config.base import Strict


class DistributedConfig(Strict):
    processes: int = Field(
        1,
        ge=1,
        description="that train together, each with the whole model, and each on another GPU where model.device is"
        " cuda; on this machine, or on several: torchrun's own number replaces this one; each draws and replays whole"
        " groups, so at most grpo.prompts_per_step",
    )
    sharded: bool = Field(
        False,
        description="each process keeps a part of every layer, which is gathered when it is called (torch's FSDP2): for"
        " a model that does not fit on one GPU; slower than whole models",
    )

    @model_validator(mode="before")
    @classmethod
    def _as_torchrun_has_started(cls, given: Any) -> Any:
        if isinstance(given, dict) and "TORCHELASTIC_RUN_ID" in os.environ:
            return given | {"processes": int(os.environ["WORLD_SIZE"])}
        return given

    @model_validator(mode="after")
    def _has_whom_to_share_with(self) -> Self:
        if self.sharded and self.processes == 1:
            raise ValueError("sharded needs processes of at least 2, each of which keeps a part of the model")
        return self
