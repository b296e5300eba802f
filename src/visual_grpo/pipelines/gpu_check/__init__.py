"""The first minutes on a GPU: steps of a training held against the plan; only on request."""

from visual_grpo.pipelines.gpu_check.pipeline import create_pipeline

__all__ = ["create_pipeline"]
