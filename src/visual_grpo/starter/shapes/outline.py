"""Measures how well formed rendered shapes are, without the templates of the reward."""

from __future__ import annotations

import math
from collections.abc import Sequence

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from visual_grpo.common.types import PromptRecord, Sample
from visual_grpo.starter.shapes.render import AREAS, BACKGROUND, RADII, SHAPES
from visual_grpo.starter.shapes.shapes_reward import DrawnReward

_LEAST_DISTANCE = 0.15
"""RGB distance (0..1 per channel) from the background up to which there is nothing in an image."""
_LEAST_SIDE = 0.06
"""Smallest side of a shape, as a share of the image's shorter side; what is smaller is a speck."""
_ZOOM = 4
"""Contours run through the centres of pixels. Enlarged images have less of a border that is cut off."""


class OutlineGuard(DrawnReward):
    """Share of the smallest enclosing circle, rectangle or triangle that an asked shape fills; of several, their mean.

    It is 1 for a perfect shape, and falls as outlines bulge, sag or lose corners. Unscored are images whose shapes, or
    sizes of them, are not those that the metadata ask for. A model that learns to render more triangles must not seem
    to render worse squares, nor one that learns to render small shapes worse ones: an outline that is equally uneven in
    pixels fills less of a smaller figure. Rectangles may be turned, and triangles have any angles.
    """

    guard = "its shapes are less well formed"

    def __call__(self, prompts: Sequence[PromptRecord], samples: Sequence[Sample]) -> Tensor:
        return torch.tensor([_well_formed(record, sample) for record, sample in zip(prompts, samples, strict=True)])


def _well_formed(record: PromptRecord, image: Tensor) -> float:
    found = contours(image)
    shown = sorted(shape_and_size(contour, image) for contour in found)
    if not shown or shown != asked_shapes(record):
        return math.nan
    return float(np.mean([max(fills(contour)) for contour in found]))


def asked_shapes(record: PromptRecord) -> list[tuple[str, str]]:
    """Returns (shape, size) of what should be in the picture, in the order of text."""
    subject = [] if record.metadata.get("edit") == "remove" else [record.metadata]
    other = record.metadata.get("other")
    return sorted((thing["shape"], thing["size"]) for thing in [*subject, *([] if other is None else [other])])


def shape_and_size(contour: NDArray[np.int32], image: Tensor) -> tuple[str, str]:
    """Returns the shape whose enclosing figure a contour of ``image``, [3, H, W], fills best, and the nearest size."""
    shape = SHAPES[int(np.argmax(fills(contour)))]
    radius = math.sqrt(cv2.contourArea(contour) / AREAS[shape]) / (_ZOOM * min(image.shape[-2:]))
    return shape, min(RADII, key=lambda size: abs(RADII[size] - radius))


def contours(image: Tensor) -> list[NDArray[np.int32]]:
    """Returns the outer contours [n, 1, 2] of an image's shapes, uint8 [3, H, W], the largest first.

    A shape differs from the background by at least the threshold of Otsu (1979), so that faded colours and blurred
    edges have their outlines at half of their height.
    """
    pixels = image.permute(1, 2, 0).numpy().astype(np.float32)
    distance = np.linalg.norm(pixels - np.array(BACKGROUND, np.float32), axis=2)
    if distance.max() < _LEAST_DISTANCE * 255:
        return []
    large = cv2.resize(distance, None, fx=_ZOOM, fy=_ZOOM, interpolation=cv2.INTER_CUBIC)
    levels = np.clip(large * (255 / distance.max()), 0, 255).astype(np.uint8)
    _, mask = cv2.threshold(levels, 0, 255, cv2.THRESH_BINARY + cv2.THRESH_OTSU)
    found, _ = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    least = (_LEAST_SIDE * _ZOOM * min(image.shape[-2:])) ** 2
    kept = [np.asarray(contour, dtype=np.int32) for contour in found if cv2.contourArea(contour) >= least]
    return sorted(kept, key=cv2.contourArea, reverse=True)


def fills(contour: NDArray[np.int32]) -> tuple[float, float, float]:
    """Returns the shares of the smallest enclosing circle, rectangle and triangle that a contour encloses."""
    area = cv2.contourArea(contour)
    _, radius = cv2.minEnclosingCircle(contour)
    _, (width, height), _ = cv2.minAreaRect(contour)
    triangle, _ = cv2.minEnclosingTriangle(contour)
    return area / (math.pi * radius**2), area / (width * height), area / triangle
