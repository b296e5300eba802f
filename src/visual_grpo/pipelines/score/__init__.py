"""Scores of a folder of pictures, to try rewards and weights before a training; only on request."""

from visual_grpo.pipelines.score.pipeline import create_pipeline

__all__ = ["create_pipeline"]
