"""Limits for new data, compared with those of an earlier training, before anything is trained on them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from visual_grpo.config.base import Strict

Limit = Annotated[float, Field(ge=0, le=1)]


class DataChecks(Strict):
    """Limits of `records.drift.check`, see docs/own_data.md; a share or distance of 1 is never exceeded."""

    min_records: int = Field(20, ge=1, description="fewest usable records")
    max_rejected: Limit = Field(0.1, description="largest share of rejected records among those that were found")
    max_fewer_records: Limit = Field(0.3, description="largest share by which the usable records may have become fewer")
    max_lost_prompts: Limit = Field(0.3, description="largest share of the earlier prompts that may be gone")
    max_kind_drift: Limit = Field(
        0.3, description="Jensen-Shannon distance of the kinds of records: with a target, with source images"
    )
    max_prompt_length_drift: Limit = Field(
        0.3, description="Kolmogorov-Smirnov distance of the prompts' lengths in characters, and in words"
    )
    max_prompt_text_drift: Limit = Field(
        0.4, description="Jensen-Shannon distance of the pairs of characters in the prompts"
    )
    max_image_drift: Limit = Field(
        0.3,
        description="Kolmogorov-Smirnov distance of the images' original size and aspect ratio, brightness, contrast,"
        " colourfulness and sharpness, each by itself",
    )
