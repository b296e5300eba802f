"""Negative labels of segmentation records, to look at; no other pipeline needs them."""

from visual_grpo.pipelines.labels.pipeline import create_pipeline

__all__ = ["create_pipeline"]
