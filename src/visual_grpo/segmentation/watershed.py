"""A segmenter without weights: a pixel belongs to the point that it reaches over the lowest colour edge.

d(pixel, point) is the least, over all paths of 4-connected pixels, of the largest colour edge on the path (a watershed
by flooding from markers; Beucher and Meyer, 1993). All of these distances are in the minimum spanning tree of the
pixels, and single linkage (Gower and Ross, 1969) lays the tree out in a line: between two pixels the distance is the
largest gap between them. So an image costs one sort, and a point one running maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from visual_grpo.errors import UserError
from visual_grpo.segmentation.segmenter import Point, PointPrompt

Integers = NDArray[np.int64]
_REMEMBERED = 128
"""Distances kept within one call, [H * W] int64 each: prompts about one image share most of their positive points."""


@dataclass(frozen=True, kw_only=True)
class Linkage:
    """The pixels of an image in a line, in which every cluster of single linkage is a stretch."""

    order: Integers
    """[H * W]: the pixel (y * W + x) at each place of the line."""
    places: Integers
    """[H * W]: the place of each pixel; the inverse of ``order``."""
    gaps: Integers
    """[H * W]: the edge between a place and the one before it, squared (see `squared_edges`); the first is 0."""
    size: tuple[int, int]
    """(height, width)."""


class WatershedSegmenter:
    """Seeded watershed by colour edges: the foreground is what is nearer to a positive than to any negative point.

    Two pixels that are as near to a positive as to a negative are background. Boxes are left unread.

    Args:
        edge: no object crosses a colour edge as large as this, L2 of RGB in 0..1: below it parts of one object, above
            it object and background.
    """

    def __init__(self, edge: float = 0.3) -> None:
        if isinstance(edge, bool) or not isinstance(edge, int | float) or not edge > 0:
            raise UserError(f"segmenter watershed: edge must be a number above 0 (RGB in 0..1), got {edge!r}")
        self.edge = edge

    def embed(self, image: Tensor) -> Linkage:
        """``image``: uint8 [3, H, W], RGB."""
        first, second, heights = squared_edges(image)
        size = (image.shape[1], image.shape[2])
        order, gaps = _line(*_spanning_tree(first, second, heights, size[0] * size[1]), size[0] * size[1])
        return Linkage(order=order, places=np.argsort(order), gaps=gaps, size=size)

    def masks(self, embedding: Linkage, prompts: Sequence[PointPrompt]) -> Tensor:
        """Bool [K, H, W]. A point outside the image counts as the nearest pixel inside."""
        # The memo ends with the call: nothing of an image is held longer than its embedding.
        distances = lru_cache(_REMEMBERED)(lambda point: _distances(embedding, point))
        found = np.zeros((len(prompts), len(embedding.order)), dtype=bool)
        for mask, prompt in zip(found, prompts, strict=True):
            mask[embedding.order] = self._is_inside(prompt, distances)
        return torch.from_numpy(found).view(len(prompts), *embedding.size)

    def _is_inside(self, prompt: PointPrompt, distances: Callable[[Point], Integers]) -> NDArray[np.bool_]:
        """[H * W] in the line's order."""
        to_positive = np.minimum.reduce([distances(point) for point in prompt.positives])
        inside = to_positive < (255 * self.edge) ** 2
        for point in prompt.negatives:
            inside &= to_positive < distances(point)
        return inside


def squared_edges(image: Tensor) -> tuple[Integers, Integers, Integers]:
    """Pairs of neighbouring pixels (y * W + x) and their colour edges, each [2 * H * W - H - W].

    An edge is the squared L2 distance of the two colours in 0..255. Integers, so that equal edges are equal: the
    distances of a flat region are ties, and float noise would decide them.
    """
    if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] != 3:
        raise ValueError(f"expected a uint8 tensor [3, height, width], got {image.dtype} {list(image.shape)}")
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
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import minimum_spanning_tree

    # A sparse graph takes a height of 0 for no edge at all. Float64 holds these integers exactly.
    graph = coo_array((heights + 1.0, (first, second)), shape=(count, count))
    tree = minimum_spanning_tree(graph).tocoo()
    rising = np.argsort(tree.data, kind="stable")
    return tree.row[rising].tolist(), tree.col[rising].tolist(), (tree.data[rising] - 1).astype(np.int64).tolist()


def _line(first: list[int], second: list[int], heights: list[int], count: int) -> tuple[Integers, Integers]:
    """Links clusters along rising edges, each time one behind the other; returns the line and its gaps, [count] each.

    Clusters are linked lists named by their first pixel. Finding the name halves the way to it, as in union-find. On
    plain lists: single items of an array cost several times as much.
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
    """[H * W] in the line's order: squared edges from ``point`` to every pixel, 0 to its own."""
    height, width = linkage.size
    x, y = (min(max(round(value), 0), side - 1) for value, side in zip(point, (width, height), strict=True))
    place = linkage.places[y * width + x]
    distances = np.empty_like(linkage.gaps)
    distances[place] = 0
    distances[place + 1 :] = np.maximum.accumulate(linkage.gaps[place + 1 :])
    distances[:place] = np.maximum.accumulate(linkage.gaps[place:0:-1])[::-1]
    return distances
