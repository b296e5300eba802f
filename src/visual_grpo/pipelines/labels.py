"""The node of the negative labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from visual_grpo.config import DataConfig, RewardConfig
from visual_grpo.errors import UserError
from visual_grpo.records.split import OPEN
from visual_grpo.records.table import RecordTable


def label_records(
    seed: int, data: DataConfig, rewards: dict[str, RewardConfig], records: RecordTable, negative_labels_draft: Path
) -> Path:
    """The folder with the negative labels, made with the segmenter of the reward ``negative_points``."""
    from visual_grpo import console
    from visual_grpo.command import Command
    from visual_grpo.evaluation.label_pictures import write_labels
    from visual_grpo.segmentation.segmenter import DEFAULT, build_segmenter

    if data.task != "segmentation":
        raise UserError(
            f"The labels are of masks, so data.task must be segmentation, got {data.task}."
            f" Try: {Command.now().of_environment('negative_points')}"
        )
    reward = rewards.get("negative_points")
    options: Any = reward.options.get("segmenter", DEFAULT) if reward else DEFAULT
    segmenter = build_segmenter(options)
    records = records.split(*OPEN)
    with console.progress("labels", len(records)) as bar:
        write_labels(negative_labels_draft, records, segmenter, seed, bar.advance)
    return negative_labels_draft
