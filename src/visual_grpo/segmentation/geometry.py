"""A mask as a box and as points."""

from __future__ import annotations

from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.segmentation.segmenter import Box, Point


def box_of(mask: Tensor) -> Box:
    """The least box around a mask, both corners inside it.

    Args:
        mask: bool [H, W].

    Raises:
        UserError: the mask is empty.
    """
    _check_not_empty(mask)
    rows, columns = mask.any(dim=1).nonzero(), mask.any(dim=0).nonzero()
    return float(columns[0]), float(rows[0]), float(columns[-1]), float(rows[-1])


def inner_points(mask: Tensor, count: int) -> list[Point]:
    """Pixels deep inside a mask: the deepest by Euclidean distance to the outside, then those deep and far from it.

    Args:
        mask: bool [H, W]; what lies beyond the image counts as outside.
        count: fewer points come back where the mask has fewer pixels.

    Raises:
        UserError: the mask is empty.
    """
    import numpy as np
    from scipy.ndimage import distance_transform_edt

    _check_not_empty(mask)
    depth = distance_transform_edt(np.pad(mask.numpy(), 1))[1:-1, 1:-1]
    y, x = np.indices(depth.shape)
    points: list[Point] = []
    while len(points) < count and depth.max() > 0:
        row, column = np.unravel_index(int(depth.argmax()), depth.shape)
        points.append((float(column), float(row)))
        depth = np.minimum(depth, np.hypot(y - row, x - column))
    return points


def _check_not_empty(mask: Tensor) -> None:
    if not mask.any():
        raise UserError(f"the mask of {mask.shape[1]}x{mask.shape[0]} pixels is empty: it has neither box nor points")
