"""The node of the negative labels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_grpo.config import Parameters
from visual_grpo.errors import UserError

if TYPE_CHECKING:
    from visual_grpo.records.table import RecordTable


def label_records(parameters: dict[str, Any], records: RecordTable) -> Callable[[Path], None]:
    """What fills the folder of the negative labels, with the segmenter of the reward ``negative_points``."""
    from visual_grpo.evaluation.label_pictures import write_labels
    from visual_grpo.segmentation.build import DEFAULT, build_segmenter

    config = Parameters.model_validate(parameters)
    if config.data.task != "segmentation":
        raise UserError(
            f"The labels are of masks, so data.task must be segmentation, got {config.data.task}."
            " Try: kedro run --env=negative_points --pipeline=labels"
        )
    reward = config.rewards.get("negative_points")
    options: Any = reward.options.get("segmenter", DEFAULT) if reward else DEFAULT
    segmenter = build_segmenter(options)

    def write(folder: Path) -> None:
        from visual_grpo import console

        with console.progress("labels", len(records)) as bar:
            write_labels(folder, records, segmenter, config.seed, bar.advance)

    return write
