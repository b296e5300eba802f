"""A training repeated from its commit, data and parameters, and compared; only on request."""

from visual_grpo.pipelines.reproduce.pipeline import create_pipeline

__all__ = ["create_pipeline"]
