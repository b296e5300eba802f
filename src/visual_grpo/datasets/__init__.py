"""Kedro datasets: what the pipelines hand to each other on disk."""

from visual_grpo.datasets.folder import DraftDataset, FolderDataset
from visual_grpo.datasets.records import RecordsDataset

__all__ = ["DraftDataset", "FolderDataset", "RecordsDataset"]
