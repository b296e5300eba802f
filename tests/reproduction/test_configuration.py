"""The parameters with which a training is repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kedro.config import OmegaConfigLoader

from tests.evaluation.defaults import parameters
from visual_grpo.config import Parameters
from visual_grpo.reproduction.configuration import parameters_to_repeat, write_configuration


def tree(**changes: Any) -> dict[str, Any]:
    return parameters(**changes).model_dump(mode="json")


def test_the_runs_own_parameters_are_used_and_its_checkpoints_are_not() -> None:
    own = tree(seed=7, grpo={"steps": 3}, resume="auto", tracking={"checkpoints": "elsewhere", "tensorboard": "logs"})
    repeated = parameters_to_repeat(own)
    assert (repeated["seed"], repeated["grpo"]["steps"]) == (7, 3)
    assert repeated["resume"] == "never"
    assert repeated["tracking"]["tensorboard"] is None
    assert repeated["tracking"]["checkpoints"] == f"{own['output']}/06_models/checkpoints"
    Parameters.model_validate(repeated)


@pytest.mark.parametrize("output", ["/somewhere/else", "../beside", "~/mine"])
def test_nothing_is_written_outside_of_the_worktree(output: str) -> None:
    own = tree(output=output)
    own["starter"] = own["starter"] | {"dataset": f"{output}/drawn", "model": f"{output}/model"}
    own["data"] = own["data"] | {"path": f"{output}/drawn"}
    repeated = parameters_to_repeat(own)
    assert repeated["output"] == "data"
    assert repeated["starter"]["dataset"] == repeated["data"]["path"] == "data/01_raw/shapes"
    assert repeated["starter"]["model"] == "data/06_models/base"


def test_ones_own_data_elsewhere_are_read_where_they_are() -> None:
    own = tree(data={"path": "/photos"})
    assert parameters_to_repeat(own)["data"]["path"] == "/photos"


def test_the_adapters_at_the_start_are_named_by_their_folder(tmp_path: Path) -> None:
    own = tree(train={"start": "champion"})
    assert parameters_to_repeat(own, tmp_path)["train"]["start"] == str(tmp_path)
    assert parameters_to_repeat(tree())["train"]["start"] == "base"


def test_kedro_reads_the_tree_as_it_is_and_nothing_else(tmp_path: Path) -> None:
    conf = tmp_path / "code/conf"
    for environment, text in (("base", "seed: 1\nold: 1\n"), ("mine", "seed: 2\n")):
        (conf / environment).mkdir(parents=True)
        (conf / environment / "parameters.yml").write_text(text)
    (conf / "mine/catalog.yml").write_text("records: {type: MemoryDataset}\n")
    own = {"seed": 3, "rewards": {"ours": {"options": {"text": "${oc.env:HOME}, ü"}}}}
    options = write_configuration(tmp_path / "code", tmp_path, own, "kedro run --env=mine --pipeline=train")
    assert options == [f"--conf-source={tmp_path / 'conf'}", "--env=mine"]
    loader = OmegaConfigLoader(str(tmp_path / "conf"), env="mine", base_env="base", default_run_env="local")
    assert loader["parameters"] == own
    assert "records" in loader["catalog"]
    assert (conf / "base/parameters.yml").read_text() == "seed: 1\nold: 1\n"


def test_an_environment_that_is_gone_is_not_named(tmp_path: Path) -> None:
    (tmp_path / "code/conf/base").mkdir(parents=True)
    assert write_configuration(tmp_path / "code", tmp_path, {}, "kedro run -e gone") == [
        f"--conf-source={tmp_path / 'conf'}"
    ]
