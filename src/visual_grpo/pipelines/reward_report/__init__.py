"""What a set of rewards is like on the base model's samples, before it is trained with; only on request."""

from visual_grpo.pipelines.reward_report.pipeline import create_pipeline

__all__ = ["create_pipeline"]
