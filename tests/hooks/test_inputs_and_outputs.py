"""What a command reads is there, and what it writes into belongs to it alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from kedro.framework.startup import bootstrap_project
from kedro.io import DataCatalog, MemoryDataset
from kedro_datasets.json import JSONDataset

from tests.evaluation.defaults import parameters
from tests.small_project import ROOT
from visual_grpo.common.errors import Remedy, UserError
from visual_grpo.data.datasets import FolderDataset
from visual_grpo.hooks.inputs_and_outputs import InputHooks, _locks
from visual_grpo.pipeline_registry import register_pipelines

MADE_BY = {"base_model": "starter", "records": "data_preparation", "baseline": "baseline", "adapters": "train"}


def test_all_that_is_missing_is_named_with_the_pipelines_that_make_it_in_their_order(tmp_path: Path) -> None:
    bootstrap_project(ROOT)
    catalog = DataCatalog(
        {
            name: JSONDataset(filepath=str(tmp_path / f"{name}.json"), metadata={"made_by": maker})
            for name, maker in MADE_BY.items()
        }
    )
    catalog["parameters"] = MemoryDataset(parameters())
    catalog.save("baseline", {})
    with pytest.raises(UserError, match=r"records \(.*, made by data_preparation") as refused:
        InputHooks().before_pipeline_run({}, register_pipelines()["evaluate"], catalog)
    assert refused.value.remedy == Remedy("starter,data_preparation,train")


@pytest.mark.parametrize(
    ("pipeline", "checkpoints", "locks"),
    [
        ("train", "data/06_models/checkpoints", {"data/.lock"}),
        ("train", "elsewhere/mine", {"data/.lock", "elsewhere/.mine.lock"}),
        ("baseline", "elsewhere/mine", {"data/.lock"}),
        ("compare", "elsewhere/mine", {"data/08_reporting/.comparison.lock"}),
    ],
)
def test_a_command_has_its_folders_alone(pipeline: str, checkpoints: str, locks: set[str]) -> None:
    places = ("07_model_output/baseline", "06_models/adapters", "08_reporting/comparison")
    catalog = DataCatalog({Path(place).name: FolderDataset(filepath=f"data/{place}") for place in places})
    found = _locks(Path("data"), Path(checkpoints), register_pipelines()[pipeline], catalog)
    assert set(map(str, found)) == locks
    catalog["adapters"] = FolderDataset(filepath="/disk/adapters")
    found = _locks(Path("data"), Path(checkpoints), register_pipelines()["train"], catalog)
    assert "/disk/.adapters.lock" in map(str, found)
