"""Judges an adapter against the champion and the base model, and makes it champion if it is better; on request."""

from visual_grpo.pipelines.promote.pipeline import create_pipeline

__all__ = ["create_pipeline"]
