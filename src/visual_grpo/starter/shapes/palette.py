"""How full the colours of drawn shapes are, whatever was asked for: what the decoder alone is responsible for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.starter.shapes.judge import color_distances, find_objects, found, nearness
from visual_grpo.types import PromptRecord, RewardOutput, Sample


class PaletteReward:
    """Mean closeness, 0..1, of the objects' colours to the nearest named one; unscored where there is no object.

    Dense and independent of the prompt, so that among decodes of one token sample it differs where ``shapes``,
    which also judges what only the tokens decide, hardly does.
    """

    name = "palette"
    needs_target = False

    def check_records(self, records: Sequence[PromptRecord]) -> None:
        """Raises UserError for records that are no drawn shapes: the palette would mean nothing there."""
        for record in records:
            if "color" not in record.metadata:
                raise UserError(
                    f"reward 'palette' judges the starter's drawn shapes, and record {record.id!r} has no metadata"
                    " color; for other data take it out: rewards.palette: null"
                )

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> RewardOutput:
        return RewardOutput(values=torch.stack([_closeness(sample) for sample in samples]))


def _closeness(image: Tensor) -> Tensor:
    objects = find_objects(image[None])
    values = nearness(objects, color_distances(objects).amin(-1))
    return torch.where(found(objects), values, torch.nan)[0]
