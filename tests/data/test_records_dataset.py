"""The prepared records as a Kedro dataset."""

from __future__ import annotations

import json

import pytest

from visual_grpo.common.errors import UserError
from visual_grpo.data.datasets import RecordsDataset
from visual_grpo.data.table import write_manifest


@pytest.fixture
def dataset(tmp_path):
    return RecordsDataset(filepath=str(tmp_path / "records.parquet"))


def test_a_missing_manifest_names_the_command(dataset):
    assert not dataset.exists()
    with pytest.raises(UserError, match=r"Make it with: \.venv/bin/kedro run --pipeline=data_preparation"):
        dataset.load()


def test_rows_stream_in_and_records_come_out(dataset, tmp_path):
    row = {
        "id": "a",
        "prompt": "a cat",
        "split": "eval",
        "target_image": "images/a.png",
        "source_images": ["images/b.png"],
        "metadata": '{"k": 1}',
    }
    write_manifest(tmp_path / "records.parquet", (dict(row, id=name) for name in "ab"))
    _, record = dataset.load()
    assert record.target_image == tmp_path / "images/a.png"
    assert record.source_images == (tmp_path / "images/b.png",)
    assert record.metadata == {"k": 1}
    assert dataset.exists()


def test_the_preview_is_a_table_of_the_first_rows(dataset, tmp_path):
    row = {"prompt": "a cat", "split": "eval", "metadata": "{}", "source_images": ["images/a.png"]}
    write_manifest(tmp_path / "records.parquet", (row | {"id": name} for name in "abc"))
    preview = dataset.preview(nrows=2)
    assert json.loads(json.dumps(preview)) == preview
    assert [dict(zip(preview["columns"], row, strict=True))["id"] for row in preview["data"]] == ["a", "b"]
