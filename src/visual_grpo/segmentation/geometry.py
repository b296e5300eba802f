"""Bounding boxes, interior points, IoU and distance transforms of masks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.segmentation.segmenter import Box, Point


def box_of(mask: Tensor) -> Box:
    """The bounding box of a mask (bool [H, W]), both corners inclusive.

    Raises:
        UserError: the mask is empty.
    """
    _refuse_empty(mask)
    columns, rows = mask.any(0).nonzero(), mask.any(1).nonzero()
    return float(columns[0]), float(rows[0]), float(columns[-1]), float(rows[-1])


def inner_points(mask: Tensor, count: int) -> list[Point]:
    """Up to ``count`` points well inside a mask (bool [H, W]).

    The first is the pixel farthest from the mask's border (its depth is the distance to the nearest pixel outside the
    mask; pixels outside the image count as outside). Each further point is the pixel farthest from the previous ones
    among those with at least half of the maximum depth. Fewer points if there are fewer such pixels.

    Raises:
        UserError: the mask is empty.
    """
    _refuse_empty(mask)
    depth = distances_to_false(np.pad(mask.cpu().numpy(), 1))[1:-1, 1:-1]
    apart = np.full(depth.shape, np.inf)
    points: list[Point] = []
    while len(points) < count:
        deep = depth >= depth.max() / (2 if points else 1)
        left = np.where(deep, apart, 0)
        if not left.any():
            break
        y, x = np.unravel_index(left.argmax(), left.shape)
        points.append((float(x), float(y)))
        apart = np.minimum(apart, np.hypot(*np.ogrid[-y : depth.shape[0] - y, -x : depth.shape[1] - x]))
    return points


def ious(masks: Tensor, truth: Tensor) -> Tensor:
    """[K] float32: intersection over union of each of ``masks`` (bool [K, H, W]) with ``truth`` (bool [H, W]).

    Raises:
        UserError: the truth is empty.
    """
    _refuse_empty(truth)
    shared = (masks & truth).sum((1, 2))
    return shared / (masks | truth).sum((1, 2))


def distances_to_false(mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """[H, W]: Euclidean distance of each pixel to the nearest False pixel; 0 for False pixels."""
    from scipy.ndimage import distance_transform_edt

    return distance_transform_edt(mask)


def _refuse_empty(mask: Tensor) -> None:
    if not mask.any():
        raise UserError(
            f"expected a mask with at least one foreground pixel, got an empty one of {mask.shape[-1]} x"
            f" {mask.shape[-2]} pixels; remove its record from the data"
        )
