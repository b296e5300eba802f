"""GRPO training of the policy."""

from visual_grpo.pipelines.train.pipeline import create_pipeline

__all__ = ["create_pipeline"]
