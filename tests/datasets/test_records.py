"""The prepared records as a Kedro dataset."""

from __future__ import annotations

import json

import pytest

from visual_grpo.datasets import RecordsDataset
from visual_grpo.datasets.folder import DataError
from visual_grpo.errors import UserError


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
    dataset.save(dict(row, id=name) for name in "ab")
    _, record = dataset.load()
    assert record.target_image == tmp_path / "images/a.png"
    assert record.source_images == (tmp_path / "images/b.png",)
    assert record.metadata == {"k": 1}
    assert dataset.exists()


def test_the_preview_is_a_table_of_the_first_rows(dataset):
    row = {"prompt": "a cat", "split": "eval", "metadata": "{}", "source_images": ["images/a.png"]}
    dataset.save(row | {"id": name} for name in "abc")
    preview = dataset.preview(nrows=2)
    assert json.loads(json.dumps(preview)) == preview
    assert [dict(zip(preview["columns"], row, strict=True))["id"] for row in preview["data"]] == ["a", "b"]


def wrong(line):
    raise UserError(f"line {line + 3} is wrong")


def test_a_users_mistake_passes_kedro_as_it_is(dataset):
    rows = map(wrong, range(1))
    with pytest.raises(DataError) as error:
        dataset.save(rows)
    assert str(error.value) == "line 3 is wrong"
