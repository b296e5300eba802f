"""The default dataset and the small base model."""

from visual_grpo.pipelines.starter.pipeline import create_pipeline

__all__ = ["create_pipeline"]
