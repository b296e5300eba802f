"""The nodes of the data preparation as functions, and wired."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from kedro.io import DataCatalog, MemoryDataset
from kedro.runner import SequentialRunner

from tests.records.making import jsonl, picture
from visual_grpo.datasets import RecordsDataset
from visual_grpo.errors import UserError
from visual_grpo.pipelines.data_preparation import create_pipeline
from visual_grpo.pipelines.data_preparation.nodes import prepare_records, report_records
from visual_grpo.records.table import RecordTable


@pytest.fixture
def parameters(tmp_path):
    text = (Path(__file__).parents[2] / "conf/base/parameters.yml").read_text()
    parameters = {**yaml.safe_load(text), "seed": 0}
    parameters["data"] |= {"path": str(tmp_path / "data"), "height": 32, "width": 32}
    return parameters


@pytest.fixture
def data(tmp_path):
    picture(tmp_path / "data/a.png")
    rows = [{"id": n, "prompt": f"a cat {n}", "target_image": "a.png"} for n in range(30)]
    return jsonl(tmp_path / "data/records.jsonl", [*rows, {"prompt": ""}])


def test_nodes_as_functions(parameters, data, tmp_path, capsys):
    prepare_records(parameters, {}).write(tmp_path / "out/records.parquet")
    table = RecordTable(tmp_path / "out/records.parquet")
    assert len(table) == 30
    report = report_records(table)
    assert report["digest"] == table.digest
    assert report["rejected"]["by_reason"] == {"empty_prompt": 1}
    shown = capsys.readouterr().out
    assert "Preparing records 31/31" in shown
    assert "1 (1 empty_prompt)" in shown
    assert f"{len(table.split('held_out'))} records" in shown


def test_the_pipeline_end_to_end(parameters, data, tmp_path):
    catalog = DataCatalog(
        {
            "parameters": MemoryDataset(parameters),
            "starter_report": MemoryDataset({}),
            "records": RecordsDataset(filepath=str(tmp_path / "out/records.parquet")),
        }
    )
    outputs = SequentialRunner().run(create_pipeline(), catalog)
    assert outputs["data_report"].load()["accepted"] == 30


def test_missing_data_are_refused_before_anything_is_done(parameters):
    with pytest.raises(UserError, match="kedro run --pipeline=starter"):
        prepare_records(parameters, {})
