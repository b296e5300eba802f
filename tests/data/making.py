"""Small datasets for the tests."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from visual_grpo.common.files import new_draft
from visual_grpo.config import DataConfig
from visual_grpo.data.datasets import RecordsDataset
from visual_grpo.data.manifest import RecordTable
from visual_grpo.data.preparation import Preparation


def picture(path: Path, size: tuple[int, int] = (40, 40), colour: str | tuple[int, ...] = "red") -> Path:
    """Writes a plain image in the format of its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


def mask(path: Path, size: tuple[int, int], box: tuple[int, int, int, int] | None = None) -> Path:
    """Writes a mask that is white in a box, whose corners belong to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("L", size)
    if box is not None:
        image.paste(255, (box[0], box[1], box[2] + 1, box[3] + 1))
    image.save(path)
    return path


def embedded(size: tuple[int, int] = (48, 64), colour: str = "red") -> dict[str, Any]:
    """An image as the hub's tables store it."""
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def jsonl(path: Path, rows: Iterable[Mapping[str, Any] | str]) -> Path:
    """Writes one line per item: mappings as JSON, text unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return path


def data_config(path: Path | str, **changes: Any) -> DataConfig:
    return DataConfig.model_validate({"path": str(path), "height": 32, "width": 64, **changes})


def prepare(folder, **changes):
    """Prepares the records in ``folder/data``; all of them train unless shares are given."""
    path = changes.pop("path", folder / "data")
    config = data_config(path, **{"held_out_share": 0, "eval_share": 0, **changes})
    manifest = folder / "out/records.parquet"
    draft = new_draft(manifest)
    Preparation(config).write(draft)
    RecordsDataset(filepath=str(manifest)).save(draft)
    return RecordTable(manifest)
