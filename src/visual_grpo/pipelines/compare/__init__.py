"""Two adapters, or one and the base model, on the same prompts; only on request."""

from visual_grpo.pipelines.compare.pipeline import create_pipeline

__all__ = ["create_pipeline"]
