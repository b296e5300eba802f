"""Records that are no training data: prompts to draw, pictures to score."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from visual_grpo.config import DataConfig
from visual_grpo.errors import counted, sentence
from visual_grpo.records.preparation import Preparation
from visual_grpo.records.raw import Place
from visual_grpo.records.table import RecordTable

_SHOWN = 5


@contextmanager
def prepared_beside(path: str, data: DataConfig, note: Callable[[str], None], parameter: str) -> Iterator[RecordTable]:
    """All records at ``path``, in any layout, checked, with images of the configured size; gone after the block.

    Args:
        parameter: what names the path, for messages.
        note: is told which records and files were left out, and why.

    Raises:
        UserError: there is nothing at the path, no layout fits, or no record can be used.
    """
    no_splits = {"eval_share": 0.0, "held_out_share": 0.0, "sealed_share": 0.0}
    own = data.model_copy(update={"path": path, "layout": "auto", **no_splits})
    with TemporaryDirectory() as folder:
        manifest = Path(folder) / "records.parquet"
        Preparation(own, parameter).write(manifest)
        records = RecordTable(manifest)
        for text in _left_out(records.report):
            note(text)
        yield records


def _left_out(report: Mapping[str, Any]) -> Iterator[str]:
    """Lines that say what of the data is not used."""
    rejected = report["rejected"]
    if rejected["total"]:
        yield f"Left out {rejected['total']} of {counted(report['records'], 'record')}:"
        for one in rejected["listed"][:_SHOWN]:
            place, message = Place(one["file"], one["line"]), one["message"]
            yield f"  {message}" if one["file"] in message else f"  {place}: {message}"
        if rejected["total"] > _SHOWN:
            yield f"  and {rejected['total'] - _SHOWN} more"
    for warning in report["warnings"]:
        yield f"Note: {sentence(warning)}"
