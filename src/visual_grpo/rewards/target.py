"""Similarity to the target image (pixel error, PSNR, SSIM, MS-SSIM, ΔE, layout) and to the image that is edited."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import cv2
import torch
import torch.nn.functional as F
from pytorch_msssim import ms_ssim, ssim
from torch import Tensor

from visual_grpo.common.device import map_on_cores
from visual_grpo.common.errors import UserError
from visual_grpo.common.images import read_image, read_size, to_tensor
from visual_grpo.common.types import Needs, PromptRecord

WINDOW = 11
"""Pixels of SSIM's Gaussian window, whose sigma is 1.5."""
_SCALES = 5
"""Scales of MS-SSIM."""
_MOST_DECIBELS = 60.0
_CELLS = 8
"""Cells a side of the grid on which layouts are compared."""
_FLAT = 1e-3
"""Norm of the cells' differences from their mean below which an image has one colour; a level of 255 is 4e-3."""


class PixelReward:
    """1 - mean squared error of pixels in [0, 1]: 1 for the target itself, 0 for the maximum error."""

    needs = Needs(target=True)

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        return 1 - against_targets(mean_squared_error, prompts, samples)


class PsnrReward:
    """Peak signal-to-noise ratio in decibels, at most 60 (the target itself would be infinite)."""

    needs = Needs(target=True)

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        decibels = -10 * against_targets(mean_squared_error, prompts, samples).log10()
        return decibels.clamp(max=_MOST_DECIBELS)


class SsimReward:
    """Structural similarity in [-1, 1] (Wang et al. 2004), Gaussian window of 11 pixels, sigma 1.5.

    Conventions differ between libraries; these are pytorch-msssim's.
    """

    needs = Needs(target=True)

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        return against_targets(partial(_similarity, "ssim"), prompts, samples)


def _similarity(name: str, sample: Tensor, target: Tensor) -> Tensor:
    """``name``: ssim or ms_ssim."""
    measure, least = (ssim, WINDOW) if name == "ssim" else (ms_ssim, (WINDOW - 1) * 2 ** (_SCALES - 1) + 1)
    if min(sample.shape[-2:]) < least:
        raise UserError(f"{name}: an image needs at least {least} pixels a side, got {list(sample.shape[-2:])}")
    similarity: Tensor = measure(sample[None], target[None], data_range=1.0, win_size=WINDOW)
    return similarity


class MsSsimReward:
    """Multi-scale structural similarity in [0, 1] (Wang et al. 2003): SSIM at five scales, each half of the one before.

    It sees coarse structure that `SsimReward` overlooks. Negative terms count as 0. The shorter side must have at least
    161 pixels.
    """

    needs = Needs(target=True)

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        return against_targets(partial(_similarity, "ms_ssim"), prompts, samples)


class DeltaEReward:
    """Minus the mean difference of colours between picture and target, ΔE*ab of CIELAB (CIE 1976, illuminant D65).

    0 for the target itself; about -2.3 where every pixel differs by as much as is just noticed (Mahy, Van Eycken and
    Oosterlinck 1994); -100 for black instead of white.
    """

    needs = Needs(target=True)

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        return -against_targets(_delta_e, prompts, samples)


def _delta_e(sample: Tensor, target: Tensor) -> Tensor:
    first, second = (
        cv2.cvtColor(image.permute(1, 2, 0).cpu().numpy(), cv2.COLOR_RGB2LAB) for image in (sample, target)
    )
    return torch.from_numpy(first - second).norm(dim=2).mean()


class TargetLayout:
    """Correlation in [-1, 1] with the target of the colours of 8 x 8 cells: are they where the target has them?

    Pearson's correlation over the cells and channels, each channel less its mean. Changes of the whole image's
    contrast, brightness or tint, blur and noise hardly move it, so that it is neither raised by smoothness nor lowered
    by detail, as errors of pixels and SSIM are. An image of one colour scores 0; where the target has one colour, the
    sample is unscored.
    """

    needs = Needs(target=True)

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        return against_targets(_correlation, prompts, samples)


def _correlation(sample: Tensor, target: Tensor) -> Tensor:
    """Scalar; NaN where the target has one colour."""
    one, other = (_cells(image) for image in (sample, target))
    if other.norm() < _FLAT:
        return torch.tensor(torch.nan)
    return (one * other).sum() / (one.norm() * other.norm()) if one.norm() >= _FLAT else one.new_zeros(())


def _cells(image: Tensor) -> Tensor:
    """Mean colours of the cells minus the whole image's, so that a tint counts for nothing: [3, height, width] ->
    [3, 8, 8]."""
    cells = F.interpolate(image[None], size=(_CELLS, _CELLS), mode="area")[0]
    return cells - cells.mean((1, 2), keepdim=True)


class SourceSsim:
    """SSIM to the image that is edited, of several that have the sample's size the greatest; unscored without one.
    A guard, with weight 0.

    An edit that changes little has a target much like its source, so that `SsimReward` can be raised by copying.
    """

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        # One record for each source, which `against_targets` reads once for all samples.
        pairs = [
            (row, replace(record, id=str(source), target_image=source))
            for row, record in enumerate(prompts)
            for number, source in enumerate(record.source_images)
            # Sources after the first keep their shape: one of a different size is not a copy.
            if number == 0 or read_size(source) == (samples[row].shape[2], samples[row].shape[1])
        ]
        sources, copies = [record for _, record in pairs], [samples[row] for row, _ in pairs]
        similar = against_targets(partial(_similarity, "ssim"), sources, copies)
        values = torch.full((len(samples),), torch.nan)
        for (row, _), value in zip(pairs, similar, strict=True):
            values[row] = torch.fmax(values[row], value)
        return values


def mean_squared_error(sample: Tensor, target: Tensor) -> Tensor:
    """Scalar float32 over all pixels and channels."""
    return (sample - target).square().mean()


def against_targets(
    measure: Callable[[Tensor, Tensor], Tensor], prompts: Sequence[PromptRecord], samples: Sequence[Tensor]
) -> Tensor:
    """[B] float32: ``measure(sample, target)`` on float32 [3, height, width] in [0, 1]; each target is read once.

    Raises ``UserError`` for a record without a target or with a target of a different shape.
    """
    targets = {record.id: _target(record) for record in prompts}

    def compared(pair: tuple[PromptRecord, Tensor]) -> Tensor:
        record, sample = pair
        target = targets[record.id].to(sample.device)
        sample, target = _at_one_size(record, f"target image {record.target_image}", sample, target)
        return measure(sample.float() / 255, target.float() / 255)

    if not len(samples):
        return torch.zeros(0)
    return torch.stack(map_on_cores(compared, list(zip(prompts, samples, strict=True)), samples[0].device)).cpu()


def _target(record: PromptRecord) -> Tensor:
    if record.target_image is None:
        raise UserError(f"record {record.id!r} has no target_image to compare with")
    return to_tensor(read_image(record.target_image))


def _at_one_size(record: PromptRecord, what: str, sample: Tensor, reference: Tensor) -> list[Tensor]:
    """``sample`` and ``reference`` at the smaller of their sizes, since training samples may have a different size than
    prepared images; both uint8 [3, height, width]."""
    (h, w), (height, width) = sample.shape[-2:], reference.shape[-2:]
    if h * width != w * height:
        raise UserError(
            f"record {record.id!r}: its {what} is {list(reference.shape)} and the sample {list(sample.shape)}; both"
            " must be [3, height, width] of the same shape"
        )
    size = min((h, w), (height, width))
    return [
        image
        if image.shape[-2:] == size
        else F.interpolate(image[None].float(), size, mode="area")[0].round().to(torch.uint8)
        for image in (sample, reference)
    ]


class KeptRegion:
    """1 - mean squared error to the image that is edited, of pixels in [0, 1] outside the edited region.

    The region is the record's metadata ``region``: a list of boxes [top, left, bottom, right] in shares of height and
    width. A pixel is outside if its centre is in no box. A record without a region, or whose region is the whole
    image, is unscored. Of several sources the first counts.
    """

    def check_records(self, records: Sequence[PromptRecord]) -> None:
        """Raises UserError if a region is malformed, lacks its source image, or no record has one."""
        for record in records:
            if region_of(record) and not record.source_images:
                raise UserError(
                    f"the reward kept_region compares with a source image, and record {record.id!r} has a region but no"
                    " source_image. Add it or remove the region"
                )
        if records and not any(region_of(record) for record in records):
            raise UserError(
                f"the reward kept_region looks outside the edited region, and none of {len(records)} records has any;"
                f" the first is {records[0].id!r}. Add metadata region: a list of boxes [top, left, bottom, right] in"
                " shares from 0 to 1, or remove the reward"
            )

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Tensor]) -> Tensor:
        unique = {record.id: record for record in prompts if region_of(record) and record.source_images}
        sources = {name: to_tensor(read_image(record.source_images[0])) for name, record in unique.items()}
        values = torch.full((len(samples),), torch.nan)
        for row, (record, sample) in enumerate(zip(prompts, samples, strict=True)):
            if record.id in sources:
                values[row] = _kept(record, sample.cpu(), sources[record.id])
        return values


Region = tuple[float, float, float, float]
"""Top, left, bottom, right as shares of height and width."""


def region_of(record: PromptRecord) -> list[Region]:
    """The boxes of the edited region; empty if there are none. Raises UserError where they are malformed."""
    boxes = record.metadata.get("region")
    if boxes is None:
        return []
    if not isinstance(boxes, list | tuple) or not boxes or not all(map(is_box, boxes)):
        raise UserError(
            f"record {record.id!r} has metadata region {boxes!r}; expected a list of boxes [top, left, bottom, right]"
            " in shares of height and width from 0 to 1, such as [[0, 0.25, 0.5, 0.75]]"
        )
    return [(float(top), float(left), float(bottom), float(right)) for top, left, bottom, right in boxes]


def is_box(box: Any) -> bool:
    """True for [top, left, bottom, right] as shares of height and width."""
    if not isinstance(box, list | tuple) or len(box) != 4 or any(type(edge) not in (int, float) for edge in box):
        return False
    top, left, bottom, right = box
    return 0 <= top < bottom <= 1 and 0 <= left < right <= 1


def _kept(record: PromptRecord, sample: Tensor, source: Tensor) -> Tensor:
    """Scalar; NaN where no pixel is outside."""
    sample, source = _at_one_size(record, f"source image {record.source_images[0]}", sample, source)
    outside = _outside(region_of(record), *sample.shape[-2:])
    if not outside.any():
        return torch.tensor(torch.nan)
    return 1 - mean_squared_error(sample[:, outside].float() / 255, source[:, outside].float() / 255)


def _outside(boxes: Sequence[Region], height: int, width: int) -> Tensor:
    """Bool [height, width]."""
    down = ((torch.arange(height) + 0.5) / height)[:, None]
    right = ((torch.arange(width) + 0.5) / width)[None]
    inside = torch.zeros(height, width, dtype=torch.bool)
    for top, left, bottom, end in boxes:
        inside |= (down >= top) & (down < bottom) & (right >= left) & (right < end)
    return ~inside
