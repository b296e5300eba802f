"""Rewards saturated colours of drawn shapes, whichever colour was asked for: a property of the decoder alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from visual_grpo.starter.shapes.drawn import check_drawn
from visual_grpo.starter.shapes.judge import color_distances, find_objects, found, nearness
from visual_grpo.types import PromptRecord, RewardOutput, Sample


class PaletteReward:
    """Mean closeness, 0..1, of the object's colour to the nearest named colour.

    A picture without an object scores 0 where the prompt asks for one, and 1 where none should be left (the edit
    ``remove`` of the only object): blank pictures are judged like all others, never left out.

    Dense and independent of the colour asked for, so that it differs between decodes of the same tokens, where
    ``shapes`` hardly differs because it mostly judges properties that the tokens determine.
    """

    name = "palette"

    def check_records(self, records: Sequence[PromptRecord]) -> None:
        """Raises UserError for records that are not drawn shapes, for which the palette is meaningless."""
        check_drawn(self.name, records)

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> RewardOutput:
        pairs = zip(prompts, samples, strict=True)
        return RewardOutput(values=torch.stack([_closeness(sample, blank=_blank(record)) for record, sample in pairs]))


def _blank(record: PromptRecord) -> float:
    """What a picture without an object is worth."""
    removes = record.metadata.get("edit") == "remove"
    return float(removes and record.metadata.get("other") is None)


def _closeness(image: Tensor, *, blank: float) -> Tensor:
    objects = find_objects(image[None])
    values = nearness(objects, color_distances(objects).amin(-1))
    return torch.where(found(objects), values, blank)[0]
