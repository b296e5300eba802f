"""Is what an edit should not touch left as it was?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.images import read_image, to_tensor
from visual_grpo.rewards.target import mean_squared_error
from visual_grpo.types import PromptRecord

_KEY = "region"


class KeptRegion:
    """1 - mean squared error to the image that is edited, of pixels in [0, 1] outside the edited region.

    The region is the record's metadata ``region``: a list of boxes [top, left, bottom, right] in shares of height and
    width. A pixel is outside if its centre is in no box. A record without a region, or whose region is the whole
    image, is unscored. Of several sources the first counts; it must have the sample's size.
    """

    def check_records(self, records: Sequence[PromptRecord]) -> None:
        """Raises UserError if a region is malformed, lacks its source image, or no record has one."""
        for record in records:
            if region_of(record) and not record.source_images:
                raise UserError(
                    f"the reward kept_region compares with a source image, and record {record.id!r} has a {_KEY} but no"
                    " source_image. Add it or remove the region"
                )
        if records and not any(region_of(record) for record in records):
            raise UserError(
                f"the reward kept_region looks outside the edited region, and none of {len(records)} records has any;"
                f" the first is {records[0].id!r}. Add metadata {_KEY}: a list of boxes [top, left, bottom, right] in"
                " shares from 0 to 1, or remove the reward"
            )

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        sources = {
            record.id: to_tensor(read_image(record.source_images[0]))
            for record in {record.id: record for record in prompts}.values()
            if region_of(record) and record.source_images
        }
        values = torch.full((len(samples),), torch.nan)
        for row, (record, sample) in enumerate(zip(prompts, samples, strict=True)):
            if record.id in sources:
                values[row] = _kept(record, sample.cpu(), sources[record.id])
        return values


def region_of(record: PromptRecord) -> list[tuple[float, float, float, float]]:
    """The boxes of the edited region; empty if there are none. Raises UserError where they are malformed."""
    boxes = record.metadata.get(_KEY)
    if boxes is None:
        return []
    if not isinstance(boxes, Sequence) or isinstance(boxes, str) or not boxes or not all(map(_is_box, boxes)):
        raise UserError(
            f"record {record.id!r} has metadata {_KEY} {boxes!r}; expected a list of boxes [top, left, bottom, right]"
            " in shares of height and width from 0 to 1, such as [[0, 0.25, 0.5, 0.75]]"
        )
    return [(float(top), float(left), float(bottom), float(right)) for top, left, bottom, right in boxes]


def _is_box(box: Any) -> bool:
    if not isinstance(box, Sequence) or isinstance(box, str) or len(box) != 4:
        return False
    if not all(isinstance(edge, int | float) and not isinstance(edge, bool) for edge in box):
        return False
    top, left, bottom, right = box
    return 0 <= top < bottom <= 1 and 0 <= left < right <= 1


def _kept(record: PromptRecord, sample: Tensor, source: Tensor) -> Tensor:
    """Scalar; NaN where no pixel is outside."""
    if source.shape != sample.shape:
        raise UserError(
            f"record {record.id!r}: its source image {record.source_images[0]} is {list(source.shape)} and the sample"
            f" {list(sample.shape)}; both must be [3, height, width] of the same size"
        )
    outside = _outside(region_of(record), *sample.shape[-2:])
    if not outside.any():
        return torch.tensor(torch.nan)
    return 1 - mean_squared_error(sample[:, outside].float() / 255, source[:, outside].float() / 255)


def _outside(boxes: Sequence[tuple[float, float, float, float]], height: int, width: int) -> Tensor:
    """Bool [height, width]."""
    down = ((torch.arange(height) + 0.5) / height)[:, None]
    right = ((torch.arange(width) + 0.5) / width)[None]
    inside = torch.zeros(height, width, dtype=torch.bool)
    for top, left, bottom, end in boxes:
        inside |= (down >= top) & (down < bottom) & (right >= left) & (right < end)
    return ~inside
