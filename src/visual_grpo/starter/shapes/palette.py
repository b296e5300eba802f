"""Rewards saturated colours of drawn shapes, independently of the prompt: a property of the decoder alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.starter.shapes.judge import color_distances, find_objects, found, nearness
from visual_grpo.types import PromptRecord, RewardOutput, Sample


class PaletteReward:
    """Mean closeness, 0..1, of the object's colour to the nearest named colour; unscored if there is no object.

    Dense and independent of the prompt, so that it differs between decodes of the same tokens, where ``shapes`` hardly
    differs because it mostly judges properties that the tokens determine.
    """

    name = "palette"
    needs_target = False

    def check_records(self, records: Sequence[PromptRecord]) -> None:
        """Raises UserError for records that are not drawn shapes, for which the palette is meaningless."""
        for record in records:
            if "color" not in record.metadata:
                raise UserError(
                    f"reward 'palette' judges the drawn shapes of the default dataset, and record {record.id!r} has no"
                    " metadata color; for other data remove it: rewards.palette: null"
                )

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> RewardOutput:
        return RewardOutput(values=torch.stack([_closeness(sample) for sample in samples]))


def _closeness(image: Tensor) -> Tensor:
    objects = find_objects(image[None])
    values = nearness(objects, color_distances(objects).amin(-1))
    return torch.where(found(objects), values, torch.nan)[0]
