"""A segmenter without weights: a pixel belongs to the point that it reaches over the lowest colour edge.

d(pixel, point) is the minimum, over all paths of 4-connected pixels, of the largest colour edge on the path (a
watershed by flooding from markers; Beucher and Meyer, 1993). All of these distances follow from the minimum spanning
tree of the pixels, and single linkage (Gower and Ross, 1969) orders the pixels in a line such that the distance between
two pixels is the largest gap between them. So an image costs one sort, and a point one running maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import minimum_spanning_tree
from torch import Tensor

from visual_grpo.common.errors import UserError
from visual_grpo.common.geometry import Point
from visual_grpo.common.images import require_image
from visual_grpo.rewards.segmentation import PointPrompt

Integers = NDArray[np.int64]
_CACHED_POINTS = 128
"""Points whose distances, [H * W] int64, are cached within a call: prompts of an image share most positive points."""


@dataclass(frozen=True, kw_only=True)
class Linkage:
    """The pixels of an image ordered in a line in which every single-linkage cluster is a contiguous segment."""

    order: Integers
    """[H * W]: the pixel (y * W + x) at each place of the line."""
    places: Integers
    """[H * W]: the place of each pixel; the inverse of ``order``."""
    gaps: Integers
    """[H * W]: the squared edge between a place and the previous one (see `squared_edges`); the first is 0."""
    size: tuple[int, int]
    """(height, width)."""


class WatershedSegmenter:
    """Seeded watershed on colour edges: foreground pixels are nearer to a positive than to any negative point.

    Pixels that are equally near to both are background. Boxes are ignored.

    Args:
        edge: colour edge (L2 distance of RGB in 0..1) at which an object ends; smaller edges are inside an object.
    """

    def __init__(self, edge: float = 0.3) -> None:
        if isinstance(edge, bool) or not isinstance(edge, int | float) or not edge > 0:
            raise UserError(f"segmenter watershed: edge must be a number above 0 (RGB in 0..1), got {edge!r}")
        self.edge = edge

    def embed(self, image: Tensor) -> Linkage:
        first, second, heights = squared_edges(image)
        size = (image.shape[1], image.shape[2])
        order, gaps = _line(*_spanning_tree(first, second, heights, size[0] * size[1]), size[0] * size[1])
        return Linkage(order=order, places=np.argsort(order), gaps=gaps, size=size)

    def masks(self, embedding: Linkage, prompts: Sequence[PointPrompt]) -> Tensor:
        """Bool [K, H, W]. A point outside the image is moved to the nearest pixel inside."""
        # The cache lives for one call only, so that no distances outlive the image's embedding.
        distances = lru_cache(_CACHED_POINTS)(lambda point: _distances(embedding, point))
        masks = np.zeros((len(prompts), len(embedding.order)), dtype=bool)
        for mask, prompt in zip(masks, prompts, strict=True):
            mask[embedding.order] = self._is_inside(prompt, distances)
        return torch.from_numpy(masks).view(len(prompts), *embedding.size)

    def _is_inside(self, prompt: PointPrompt, distances: Callable[[Point], Integers]) -> NDArray[np.bool_]:
        """[H * W] in the line's order."""
        to_positive = np.minimum.reduce([distances(point) for point in prompt.positives])
        inside = to_positive < (255 * self.edge) ** 2
        for point in prompt.negatives:
            inside &= to_positive < distances(point)
        return inside


def squared_edges(image: Tensor) -> tuple[Integers, Integers, Integers]:
    """Pairs of neighbouring pixels (y * W + x) and their colour edges, each [2 * H * W - H - W].

    An edge is the squared L2 distance of the two colours in 0..255. Integers, because flat regions have many equal
    distances, and float rounding would break such ties at random.
    """
    require_image(image)
    colours = image.cpu().numpy().astype(np.int64)
    pixels = np.arange(image.shape[1] * image.shape[2]).reshape(image.shape[1:])
    beside = (np.diff(colours, axis=2) ** 2).sum(0)
    below = (np.diff(colours, axis=1) ** 2).sum(0)
    return (
        np.concatenate([pixels[:, :-1].ravel(), pixels[:-1].ravel()]),
        np.concatenate([pixels[:, 1:].ravel(), pixels[1:].ravel()]),
        np.concatenate([beside.ravel(), below.ravel()]),
    )


def _spanning_tree(
    first: Integers, second: Integers, heights: Integers, count: int
) -> tuple[list[int], list[int], list[int]]:
    """The minimum spanning tree's ``count`` - 1 edges, lowest first."""
    # In a sparse graph 0 means no edge, hence + 1. Float64 represents these integers exactly.
    graph = coo_array((heights + 1.0, (first, second)), shape=(count, count))
    tree = minimum_spanning_tree(graph).tocoo()
    rising = np.argsort(tree.data, kind="stable")
    return tree.row[rising].tolist(), tree.col[rising].tolist(), (tree.data[rising] - 1).astype(np.int64).tolist()


def _line(first: list[int], second: list[int], heights: list[int], count: int) -> tuple[Integers, Integers]:
    """Joins clusters in order of rising edges, appending one to the other; returns the line and its gaps, [count] each.

    Clusters are linked lists identified by their first pixel, found with path halving as in union-find. Plain lists,
    because accessing single items of a NumPy array is several times slower.
    """
    name, last = list(range(count)), list(range(count))
    following, gap = [-1] * count, [0] * count
    for a, b, height in zip(first, second, heights, strict=True):
        while name[a] != a:
            name[a] = a = name[name[a]]
        while name[b] != b:
            name[b] = b = name[name[b]]
        following[last[a]], gap[b] = b, height
        name[b], last[a] = a, last[b]
    pixel = next(pixel for pixel in range(count) if name[pixel] == pixel)
    order = []
    while pixel >= 0:
        order.append(pixel)
        pixel = following[pixel]
    line = np.array(order)
    return line, np.array(gap)[line]


def _distances(linkage: Linkage, point: Point) -> Integers:
    """[H * W] in the line's order: squared distance from ``point`` to every pixel, 0 for its own pixel."""
    height, width = linkage.size
    x, y = (min(max(round(value), 0), side - 1) for value, side in zip(point, (width, height), strict=True))
    place = linkage.places[y * width + x]
    distances = np.empty_like(linkage.gaps)
    distances[place] = 0
    distances[place + 1 :] = np.maximum.accumulate(linkage.gaps[place + 1 :])
    distances[:place] = np.maximum.accumulate(linkage.gaps[place:0:-1])[::-1]
    return distances
