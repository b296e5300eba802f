"""Records in the layouts people have -> checked, fitted and split, with a manifest."""

from visual_grpo.pipelines.data_preparation.pipeline import create_pipeline

__all__ = ["create_pipeline"]
