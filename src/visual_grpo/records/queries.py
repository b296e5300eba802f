"""Prepares a segmentation record: stretches image and mask to one size and rescales box and points."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from visual_grpo.images import read_mask
from visual_grpo.records.coordinates import Size, box_from, points_from, stretched_box, stretched_points
from visual_grpo.records.image_store import (
    MASK,
    STRETCHED,
    ImageStore,
    Kind,
    PreparedImage,
    open_original,
    original_size,
)
from visual_grpo.records.raw import Original, Rejected, prefix_rejections
from visual_grpo.records.validate import CheckedRecord
from visual_grpo.segmentation.geometry import box_of, inner_points
from visual_grpo.segmentation.segmenter import Box, Point

if TYPE_CHECKING:
    from torch import Tensor

_POINTS = 2
"""Number of positive points that are derived from the mask if none are given, as in Seg-Zero's records."""


def prepare_query(
    store: ImageStore, record: CheckedRecord, extra: Mapping[str, Any]
) -> tuple[CheckedRecord, PreparedImage, PreparedImage]:
    """Stores image and mask and puts box and points, in pixels of the stored image, into the record's metadata.

    Args:
        record: has one source image, and the mask as its target.
        extra: optional ``box`` and ``points`` in pixels of the upright original; optional ``img_width`` and
            ``img_height``, the image's size before the dataset's authors resized it.

    Returns:
        The record, its image and its mask.

    Raises:
        Rejected: a damaged image; a mask that is empty or of another size than the image; a malformed box or point.
    """
    (original,), original_mask = record.source_images, record.target_image
    assert original_mask is not None  # ensured by check_task
    box = None if extra.get("box") is None else box_from(extra["box"])
    points = None if extra.get("points") is None else points_from(extra["points"])
    image = _stored(store, record, original, "image", STRETCHED)
    _check_size(original_mask, image, extra)
    prepared_mask = _stored(store, record, original_mask, "mask", MASK)
    mask = read_mask(store.folder / prepared_mask.name)
    if not mask.any():
        pixels = prepared_mask.original_width * prepared_mask.original_height
        with store.budgeted(original_mask, pixels):
            raise _empty(original_mask, store)
    size, to = (image.original_width, image.original_height), (store.width, store.height)
    placed = {"box": _box(box, mask, size, to), "points": _points(points, mask, size, to)}
    return replace(record, metadata=_merged_metadata(record.metadata, placed, extra)), image, prepared_mask


def _stored(store: ImageStore, record: CheckedRecord, original: Original, role: str, kind: Kind) -> PreparedImage:
    with prefix_rejections(role):
        return store.prepare(original, record.id, role, kind)


def _check_size(mask: Original, image: PreparedImage, extra: Mapping[str, Any]) -> None:
    """The mask must have the image's size, or the size that the image had before the dataset's authors resized it."""
    size, expected = original_size(mask), (image.original_width, image.original_height)
    if size not in (expected, (extra.get("img_width"), extra.get("img_height"))):
        raise Rejected(
            "wrong_mask_size",
            f"the mask is {size[0]}x{size[1]} pixels, the upright image {expected[0]}x{expected[1]}",
            "Give the mask the size of the upright image",
        )


def _empty(original: Original, store: ImageStore) -> Rejected:
    if open_original(read_mask, original).any():
        return Rejected(
            "empty_mask",
            f"the mask is empty at {store.width}x{store.height} pixels: its object is too small",
            "Raise data.height and data.width, or remove the record",
        )
    return Rejected(
        "empty_mask",
        "the mask is empty: none of its pixels is brighter than half of its range",
        "Draw the object in white on black, or remove the record",
    )


def _box(box: Box | None, mask: Tensor, size: Size, to: Size) -> Box:
    return box_of(mask) if box is None else stretched_box(box, size, to)


def _points(points: tuple[Point, ...] | None, mask: Tensor, size: Size, to: Size) -> list[Point]:
    return inner_points(mask, _POINTS) if points is None else stretched_points(points, size, to)


def _merged_metadata(metadata: str, placed: Mapping[str, Any], extra: Mapping[str, Any]) -> str:
    """The record's metadata as JSON, with ``placed`` instead of the original box and points from ``extra``."""
    given = json.loads(metadata)
    for key in placed:
        if given.get(key) != extra.get(key):
            raise Rejected(
                "ambiguous_key",
                f"the metadata already have a {key}, which would be overwritten by the prepared {key}",
                f"Move {key} from the metadata to the record's top level, or rename it",
            )
    return json.dumps({**given, **placed}, ensure_ascii=False, sort_keys=True)
