"""The nodes of the data preparation as functions, and wired."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from kedro.io import DataCatalog, MemoryDataset

from tests.data.making import jsonl, picture
from tests.pipelines.painted import run_nodes
from visual_grpo.common.errors import UserError
from visual_grpo.config import Parameters
from visual_grpo.data.datasets import RecordsDataset
from visual_grpo.data.manifest import RecordTable
from visual_grpo.hooks.parameters import parameter_entries
from visual_grpo.pipeline_registry import register_pipelines
from visual_grpo.pipelines.data_preparation import prepare_records
from visual_grpo.starter.world_defaults import with_world


@pytest.fixture
def parameters(tmp_path):
    text = (Path(__file__).parents[2] / "conf/base/parameters.yml").read_text()
    parameters = {**yaml.safe_load(text), "seed": 0}
    parameters["data"] |= {"path": str(tmp_path / "data"), "height": 32, "width": 32}
    return Parameters.model_validate(with_world(parameters))


FOLDER = "05_model_input"


def draft_in(folder: Path) -> Path:
    return RecordsDataset(filepath=str(folder / FOLDER / "records.parquet")).draft()


@pytest.fixture
def data(tmp_path):
    picture(tmp_path / "data/a.png")
    rows = [{"id": n, "prompt": f"a cat {n}", "target_image": "a.png"} for n in range(30)]
    return jsonl(tmp_path / "data/records.jsonl", [*rows, {"prompt": ""}])


def test_nodes_as_functions(parameters, data, tmp_path, capsys):
    draft, report = prepare_records(parameters.data, {}, draft_in(tmp_path))
    table = RecordTable(draft)
    assert len(table) == 30
    assert report["digest"] == table.digest
    assert report["rejected"]["by_reason"] == {"empty_prompt": 1}
    shown = capsys.readouterr().out
    assert "Preparing records 31/31" in shown
    assert "1 (1 empty_prompt)" in shown
    assert "Rejected, for example: records.jsonl, line 31: the prompt is empty." in shown
    assert f"{len(table.split('held_out'))} records" in shown
    assert "sealed" not in shown


def test_sealed_records_are_counted_beside_the_others(parameters, data, tmp_path, capsys):
    jsonl(data, [{"prompt": f"a cat {n}"} for n in range(30)])
    config = parameters.data.model_copy(update={"sealed_share": 0.3})
    draft, report = prepare_records(config, {}, draft_in(tmp_path))
    sealed = len(RecordTable(draft).split("sealed"))
    assert sealed > 3
    assert report["splits"]["sealed"] == {"records": sealed, "prompts": sealed}
    assert re.search(rf"sealed +{sealed} records, {sealed} prompts", capsys.readouterr().out)


@pytest.mark.parametrize(("repeats", "said"), [(1, ""), (20, " (also in train)")])
def test_eval_prompts_that_training_has_too_are_said(repeats, said, parameters, data, tmp_path, capsys):
    jsonl(data, [{"prompt": f"a cat {n % (60 // repeats)}"} for n in range(60)])
    prepare_records(parameters.data, {}, draft_in(tmp_path))
    (found,) = re.findall(r"eval +\d+ records, \d+ prompts?(.*)", capsys.readouterr().out)
    assert found.rstrip() == said


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [
        ([2], "2 a record (30 records)"),
        ([0, 1, 3], "0 a record (10 records), 1 a record (10 records), 3 a record (10 records)"),
        ([0, 1], None),
    ],
)
def test_several_sources_are_counted(numbers, shown, parameters, data, tmp_path, capsys):
    rows = [{"prompt": f"a {n}", "group": n, "source_image": ["a.png"] * numbers[n % len(numbers)]} for n in range(30)]
    jsonl(data, rows)
    config = parameters.data.model_copy(update={"task": "mixed"})
    prepare_records(config, {}, draft_in(tmp_path))
    printed = " ".join(capsys.readouterr().out.split())
    assert shown in printed if shown else "a record" not in printed


def test_the_pipeline_end_to_end(parameters, data, tmp_path):
    outputs = run(parameters, tmp_path)
    assert outputs["data_report"].load()["accepted"] == 30
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == ["images", "records.parquet"]


def test_the_report_comes_before_the_records_are_used():
    nodes = register_pipelines()["__default__"].nodes
    [reports] = [number for number, node in enumerate(nodes) if "data_report" in node.outputs]
    assert reports < min(number for number, node in enumerate(nodes) if "records" in node.inputs)


def run(parameters, folder):
    changed = parameters.model_copy(update={"output": str(folder)})
    catalog = DataCatalog(
        {name: MemoryDataset(value) for name, value in parameter_entries(changed).items()}
        | {
            "base_model": MemoryDataset({}),
            "draft": MemoryDataset("a path"),
            "records": RecordsDataset(filepath=str(folder / FOLDER / "records.parquet")),
        }
    )
    return run_nodes(register_pipelines()["data_preparation"], catalog)


def test_a_second_preparation_removes_images_only_once_its_manifest_is_in_place(parameters, data, tmp_path):
    run(parameters, tmp_path)
    images, manifest = tmp_path / FOLDER / "images", tmp_path / FOLDER / "records.parquet"
    before, old = {path.name for path in images.iterdir()}, manifest.read_bytes()
    picture(tmp_path / "data/a.png", colour="blue")
    draft, _ = prepare_records(parameters.data, {}, draft_in(tmp_path))
    assert manifest.read_bytes() == old
    assert before < {path.name for path in images.iterdir()}, "a crash now leaves the old records with their images"
    RecordsDataset(filepath=str(manifest)).save(draft)
    assert before.isdisjoint(path.name for path in images.iterdir())
    assert all(record.target_image and record.target_image.is_file() for record in RecordTable(manifest))
    assert not draft.exists()


def test_missing_data_are_refused_before_anything_is_done(parameters, tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        prepare_records(parameters.data, {}, draft_in(tmp_path))
    (draft,) = (tmp_path / FOLDER).iterdir()  # It goes with the process.
    assert (draft.name[0], draft.read_bytes()) == (".", b"")
