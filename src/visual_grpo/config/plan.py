"""What the pipeline plan counts for."""

from __future__ import annotations

from pydantic import Field

from visual_grpo.config.base import Name, Strict


class PlanConfig(Strict):
    """Settings of the pipeline plan, which needs neither weights nor a GPU."""

    gpu: Name | None = Field(
        None,
        description="name of the card, such as L4, RTX 4090, L40S, A100 80GB or H100; null = the smallest that fits",
    )
    price_per_hour: float | None = Field(None, ge=0, description="of one card; null = no cost is given")
    prompt_words: int = Field(
        64, ge=1, le=2048, description="length of the planned prompts, of which a word is about a token"
    )
    largest_batches: bool = Field(True, description="also look for the largest batches that fit")
    tables: bool = Field(False, description="print every phase, not only the answer; plan.json always has all")
