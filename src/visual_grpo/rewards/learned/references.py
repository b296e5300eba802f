"""Comparison of samples with images of their records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.images import read_image, to_tensor
from visual_grpo.types import Needs, PromptRecord

Against = Literal["source", "target"]


def needs_of(reward: str, against: str) -> Needs:
    """What a reward with the option ``against`` needs. Raises UserError unless that is source or target."""
    if against not in ("source", "target"):
        raise UserError(f"{reward}: against must be source or target, got {against!r}")
    return Needs(source=against == "source", target=against == "target")


def to_references(
    prompts: Sequence[PromptRecord],
    samples: Sequence[Tensor],
    needs: Needs,
    features: Callable[[Sequence[Tensor]], Tensor],
    similarity: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """[B] float32: ``similarity`` of a sample to its target, or to the nearest of its sources; NaN without one.

    Args:
        features: of images, [N, ...], row by row; of each reference once.
        similarity: scalar, of two images' features.
    """
    paths = [_references(record, needs) for record in prompts]
    unique = list(dict.fromkeys(path for own in paths for path in own))
    known = dict(zip(unique, features([to_tensor(read_image(path)) for path in unique]), strict=True))
    values = torch.full((len(samples),), torch.nan)
    for row, (own, sample) in enumerate(zip(paths, features(samples), strict=True)):
        for path in own:
            values[row] = torch.fmax(values[row], similarity(sample, known[path]))
    return values


def _references(record: PromptRecord, needs: Needs) -> Sequence[Path]:
    if needs.source:
        return record.source_images
    return () if record.target_image is None else (record.target_image,)
