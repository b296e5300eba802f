"""The reference policy's samples, against which training is judged."""

from visual_grpo.pipelines.baseline.pipeline import create_pipeline

__all__ = ["create_pipeline"]
