"""Reads the ground truth of a prepared segmentation record."""

from __future__ import annotations

from visual_grpo.segmentation.segmenter import Box, Point
from visual_grpo.types import PromptRecord


def true_box_and_points(record: PromptRecord) -> tuple[Box, tuple[Point, ...]]:
    """Box and positive points from the metadata, where ``records.queries`` puts them, in pixels of the image."""
    x1, y1, x2, y2 = map(float, record.metadata["box"])
    return (x1, y1, x2, y2), tuple((float(x), float(y)) for x, y in record.metadata["points"])
