"""Pictures of prompts, with any adapter or none; only on request."""

from visual_grpo.pipelines.generate.pipeline import create_pipeline

__all__ = ["create_pipeline"]
