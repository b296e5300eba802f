"""What a training would need on a named GPU; needs neither weights nor a GPU, and only on request."""

from visual_grpo.pipelines.plan.pipeline import create_pipeline

__all__ = ["create_pipeline"]
