"""Adapters of earlier runs, found in a real MLflow store."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest

from tests.evaluation.defaults import parameters
from tests.hub import COMMIT, counted, hub
from visual_grpo.adapter_folder import read_facts
from visual_grpo.common.errors import UserError
from visual_grpo.tracking.adapter_lookup import find_adapters, start_of_training

LATEST = Path("latest/adapters")


@pytest.fixture(scope="module")
def runs(empty_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Name -> id of runs, of which the last two have no adapters."""
    folder = tmp_path_factory.mktemp("mlflow")
    shutil.copy(empty_database, folder / "mlflow.db")
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
        ("ar seed 1", r"'ar seed 1' is neither a folder of adapters nor an MLflow run\. Did you mean 'ar seed 0'\?"),
        ("twice", r"2 MLflow runs are named 'twice'; name one by its id: [0-9a-f]{32}, [0-9a-f]{32}$"),
        ("empty", r"'empty' has no adapters"),
        (
            "shapes@champion",
            r"'shapes@champion' is neither a folder of adapters nor an MLflow run\. A registered adapter is",
        ),
        ("baseline seed 1", r"'baseline seed 1' is neither a folder of adapters nor an MLflow run\. .* lists all runs"),
    ],
)
def test_what_cannot_be_found_is_explained(runs: dict[str, str], named: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        find_adapters(named, LATEST)


def test_the_beginning_of_an_id_that_is_a_number_is_a_text() -> None:
    assert parameters(adapter=82790959, compare={"first": 12345678}).adapter == "82790959"


LORAS: list[tuple[str, list[str], str]] = [
    ("someone/one", ["step_100.safetensors"], "step_100.safetensors"),
    ("someone/diffusers", ["pytorch_lora_weights.safetensors", "old.safetensors"], "pytorch_lora_weights.safetensors"),
    ("https://huggingface.co/someone/one/", ["a.safetensors"], "a.safetensors"),
    (
        "https://huggingface.co/someone/many/blob/main/b.safetensors",
        ["a.safetensors", "b.safetensors"],
        "b.safetensors",
    ),
    ("someone/many/b/b.safetensors", ["a.safetensors", "b/b.safetensors"], "b/b.safetensors"),
]


@pytest.mark.parametrize(("named", "files", "chosen"), LORAS, ids=[row[0] for row in LORAS])
def test_a_lora_on_the_hub_is_a_start(
    named: str, files: list[str], chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub(
        "/".join(named.removeprefix("https://huggingface.co/").split("/")[:2]),
        lora_repository(tmp_path, files, monkeypatch),
    ) as asked:
        found = start_of_training(named, LATEST)
    assert found is not None
    assert (found.parts[-1 - len(Path(chosen).parts)], found.read_text()) == (COMMIT, chosen)
    assert asked == [chosen]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with counted() as requests:
        if "someone/one" in named:  # There may be others.
            with pytest.raises(UserError, match="If it was downloaded, name its file"):
                start_of_training(named, LATEST)
            named = f"someone/one/{chosen}"
        assert start_of_training(named, LATEST) == found
    assert requests == []


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (
            "someone/many",
            r"files of weights are: a\.safetensors, b\.safetensors\. Name one, as train\.start=OWNER",
        ),
        ("someone/other", r"the hub has no LoRA someone/other; .*\. It is neither a folder nor a file here"),
        ("here.safetensors", r"train\.start is here\.safetensors, a file that does not exist"),
        ("here.bin", r"only \.safetensors is read, since other files can bring code"),
        ("someone/many/a.pt", r"only \.safetensors is read"),
    ],
)
def test_a_lora_that_cannot_be_had_is_told(
    named: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = lora_repository(tmp_path, ["a.safetensors", "b.safetensors"], monkeypatch)
    with hub("someone/many", folder) as asked, pytest.raises(UserError, match=said):
        start_of_training(named, LATEST)
    assert asked == []


def lora_repository(folder: Path, files: list[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files whose content is their name; the cache is empty."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "cache"))
    for name in files:
        (folder / "repository" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "repository" / name).write_text(name)
    return folder / "repository"


def test_a_folder_below_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "adapters").mkdir()
    assert find_adapters("~/adapters", tmp_path / "latest") == tmp_path / "adapters"


def test_a_misspelt_file_in_a_folder_is_not_asked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/loras").mkdir(parents=True)
    with pytest.raises(UserError, match=r"data/loras/typo\.safetensors, a file that does not exist"):
        start_of_training("data/loras/typo.safetensors", tmp_path / "latest")
