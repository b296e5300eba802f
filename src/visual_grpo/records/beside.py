"""Records that are no training data: prompts to draw, pictures to score."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from visual_grpo.config import DataConfig
from visual_grpo.records.preparation import Preparation
from visual_grpo.records.table import RecordTable


@contextmanager
def prepared_beside(path: str, data: DataConfig) -> Iterator[RecordTable]:
    """All records at ``path``, in any layout, checked, with images of the configured size; gone after the block.

    Raises:
        UserError: there is nothing at the path, no layout fits, or no record can be used.
    """
    own = data.model_copy(update={"path": path, "layout": "auto", "eval_share": 0.0, "held_out_share": 0.0})
    with TemporaryDirectory() as folder:
        manifest = Path(folder) / "records.parquet"
        Preparation(own).write(manifest)
        yield RecordTable(manifest)
