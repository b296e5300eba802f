"""The trained policy on the baseline's prompts and seeds, and what changed."""

from visual_grpo.pipelines.evaluate.pipeline import create_pipeline

__all__ = ["create_pipeline"]
