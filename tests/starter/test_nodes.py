"""The starter's node with a given model, so that nothing is pretrained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from visual_grpo.config import Parameters
from visual_grpo.pipelines.starter import build

PARAMETERS = Path(__file__).parents[2] / "conf" / "base" / "parameters.yml"


@pytest.fixture
def parameters(tmp_path: Path) -> dict[str, Any]:
    """The default parameters with a custom model and all folders in a temporary directory."""
    tree: dict[str, Any] = yaml.safe_load(PARAMETERS.read_text(encoding="utf-8"))
    tree["seed"] = 0
    tree["model"]["path"] = "zai-org/GLM-Image"
    tree["data"] |= {"path": str(tmp_path / "shapes"), "height": 32, "width": 32}
    tree["starter"] |= {"dataset": str(tmp_path / "shapes"), "model": str(tmp_path / "base"), "records_per_prompt": 1}
    return tree


def build_from(parameters: dict[str, Any]) -> dict[str, Any]:
    config = Parameters.model_validate(parameters)
    return build(config.starter, config.data, config.model, config.seed)


def test_a_given_model_is_passed_on_and_the_shapes_are_drawn(parameters: dict[str, Any], tmp_path: Path) -> None:
    report = build_from(parameters)
    assert (report["model"], report["dataset"]) == ("zai-org/GLM-Image", str(tmp_path / "shapes"))
    assert (tmp_path / "shapes" / "records.jsonl").is_file()
    assert not (tmp_path / "base").exists()
    for change in ({"path": "another/model"}, {"revision": "abc"}):
        other = {**parameters, "model": {**parameters["model"], **change}}
        assert build_from(other)["digest"] != report["digest"]
    parameters["data"]["path"] = str(tmp_path / "mine")
    assert build_from(parameters)["dataset"] == str(tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_the_task_decides_what_is_drawn(parameters: dict[str, Any], tmp_path: Path) -> None:
    parameters["data"]["task"] = "i2i"
    build_from(parameters)
    assert len(list((tmp_path / "shapes" / "source_images").iterdir())) == 150


def test_the_digest_of_a_folder_is_that_of_its_files(parameters: dict[str, Any], tmp_path: Path) -> None:
    digests = []
    for name, weights in (("one", "weights"), ("copy", "weights"), ("tuned", "other weights")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(weights)
        parameters["model"]["path"] = str(tmp_path / name)
        digests.append(build_from(parameters)["digest"])
    assert digests[0] == digests[1] != digests[2]
