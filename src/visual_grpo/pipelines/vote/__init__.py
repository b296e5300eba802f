"""People choose between pictures on a local page; only on request."""

from visual_grpo.pipelines.vote.pipeline import create_pipeline

__all__ = ["create_pipeline"]
