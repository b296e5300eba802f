"""Puts the alias back on the version that the champion replaced; on request."""

from visual_grpo.pipelines.rollback.pipeline import create_pipeline

__all__ = ["create_pipeline"]
