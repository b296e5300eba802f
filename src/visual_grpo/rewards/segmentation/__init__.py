"""Promptable segmentation models: embed an image once, then predict masks for many prompts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Protocol

from torch import Tensor

from visual_grpo.common.errors import UserError, nearest_hint
from visual_grpo.common.geometry import Box, Point
from visual_grpo.common.types import PromptRecord

KINDS: Mapping[str, str] = {
    "watershed": "visual_grpo.rewards.segmentation.watershed:WatershedSegmenter",
    "sam2": "visual_grpo.rewards.segmentation.sam2:Sam2Segmenter",
    "sam3": "visual_grpo.rewards.segmentation.sam2:Sam3Segmenter",
}
DEFAULT: Mapping[str, Any] = {"kind": "watershed"}


@dataclass(frozen=True, kw_only=True)
class PointPrompt:
    """Points inside and outside an object, at least one inside, and optionally its box."""

    positives: tuple[Point, ...]
    negatives: tuple[Point, ...] = ()
    box: Box | None = None
    """Segmenters that support only points ignore it."""


class Segmenter(Protocol):
    """``embed`` is expensive and runs once per image; ``masks`` takes all prompts of an image in one batch.

    A method ``multimasks`` gives alternative masks of a prompt, bool [M, H, W], and estimates of their quality, [M].
    """

    def embed(self, image: Tensor) -> Any:
        """``image``: uint8 [3, H, W], RGB."""
        ...

    def masks(self, embedding: Any, prompts: Sequence[PointPrompt]) -> Tensor:
        """Bool [K, H, W]: the most likely mask of each prompt, at the image's size; K may be 0."""
        ...


def build_segmenter(options: Mapping[str, Any] = DEFAULT) -> Segmenter:
    """Builds the segmenter of a ``kind`` with the other keys as its options, such as
    ``{"kind": "sam2", "path": "facebook/sam2.1-hiera-large"}``. Raises UserError for impossible ones.
    """
    if not isinstance(options, Mapping) or str(options.get("kind")) not in KINDS:
        hint = nearest_hint(str(options.get("kind")), KINDS) if isinstance(options, Mapping) else ""
        raise UserError(f"segmenter: expected options with a kind, {' or '.join(KINDS)}, got {options!r}.{hint}")
    kind, arguments = str(options["kind"]), {name: value for name, value in options.items() if name != "kind"}
    constructor = resolve_name(KINDS[kind])
    try:
        inspect.signature(constructor).bind(**arguments)
    except TypeError as error:  # It names the option.
        known = ", ".join(inspect.signature(constructor).parameters)
        raise UserError(f"segmenter {kind}: {error}; its options are {known}") from error
    built: Segmenter = constructor(**arguments)
    return built


def true_box_and_points(record: PromptRecord) -> tuple[Box, tuple[Point, ...]]:
    """Returns the box and positive points in the metadata (`data.images` writes them), in pixels of the image."""
    x1, y1, x2, y2 = map(float, record.metadata["box"])
    return (x1, y1, x2, y2), tuple((float(x), float(y)) for x, y in record.metadata["points"])
