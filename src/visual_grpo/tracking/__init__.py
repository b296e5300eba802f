"""MLflow: what a run logs, what it is called, where it comes from. Only this package imports mlflow."""

from visual_grpo.tracking.tracker import Tracker

__all__ = ["Tracker"]
