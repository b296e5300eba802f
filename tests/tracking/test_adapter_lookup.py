"""Adapters of earlier runs, found in a real MLflow store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest

from tests.evaluation.defaults import parameters
from visual_grpo.common.errors import UserError
from visual_grpo.config.adapter_folder import read_facts
from visual_grpo.tracking.adapter_lookup import find_adapters

LATEST = Path("latest/adapters")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Name -> id of runs, of which the last two have no adapters."""
    folder = tmp_path_factory.mktemp("mlflow")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
    mlflow.create_experiment("adapters", artifact_location=(folder / "artifacts").as_uri())
    mlflow.set_experiment("adapters")
    ids = {}
    for name in ("ar seed 0", "dit seed 0", "twice", "twice", "empty", "baseline seed 0"):
        with mlflow.start_run(run_name=name) as run:
            ids[name] = run.info.run_id
            if name not in ("empty", "baseline seed 0"):
                mlflow.log_dict({"name": name}, "adapters/training.json")
                mlflow.set_tag("training.digest", "d")
    yield ids
    mlflow.set_tracking_uri(before)


def test_a_run_is_found_by_its_name_its_id_and_the_beginning_of_it(runs: dict[str, str]) -> None:
    for name in ("ar seed 0", "dit seed 0"):
        artifacts = mlflow.get_run(runs[name]).info.artifact_uri.removeprefix("file://")
        for named in (name, runs[name], runs[name][:8]):
            found = find_adapters(named, LATEST)
            assert read_facts(found) == {"name": name}
            assert found.is_relative_to(artifacts), "no copy"


def test_the_latest_and_a_folder_need_no_mlflow(tmp_path: Path) -> None:
    (tmp_path / "training.json").write_text(json.dumps({"steps": 1}))
    assert find_adapters("latest", LATEST) == LATEST
    assert find_adapters(str(tmp_path), LATEST) == tmp_path


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("ar seed 1", r"no MLflow run 'ar seed 1'\. Did you mean 'ar seed 0'\?"),
        ("twice", r"2 MLflow runs are named 'twice'; name one by its id: [0-9a-f]{32}, [0-9a-f]{32}$"),
        ("empty", r"'empty' has no adapters"),
        (
            "shapes@champion",
            r"no MLflow run 'shapes@champion'\. A registered adapter is named models:/NAME@",
        ),
        ("baseline seed 1", r"no MLflow run 'baseline seed 1'\. .* lists all runs"),
    ],
)
def test_what_cannot_be_found_is_explained(runs: dict[str, str], named: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        find_adapters(named, LATEST)


def test_the_beginning_of_an_id_that_is_a_number_is_a_text() -> None:
    assert parameters(adapter=82790959, compare={"first": 12345678}).adapter == "82790959"
