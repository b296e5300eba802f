"""Versions of a registered model, and the alias that points to the champion, in a real MLflow database."""

from __future__ import annotations

import json
import shutil
import socket
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest
import yaml
from mlflow import MlflowClient

from tests.tracking.conftest import EXPERIMENT, Project
from tests.tracking.toy_adapters import MODULE_FILES, adapters, base_model
from visual_grpo.errors import UserError
from visual_grpo.tracking import registry, registry_client
from visual_grpo.tracking.cleaning import delete_versions
from visual_grpo.tracking.model_ref import find_adapters
from visual_grpo.tracking.versions import Registered
from visual_grpo.trained_adapters import adapter_digest, check_weights, modules_of, read_facts, weight_sums

NAME = "shapes"
LATEST = Path("latest/adapters")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return base_model(tmp_path / "base")


@pytest.fixture
def trained(tmp_path: Path, base: Path) -> Path:
    return adapters(tmp_path / "adapters", base)


def register(project: Project, folder: Path, **more: Any) -> Registered:
    return registry.register(project.uri, NAME, folder, experiment=EXPERIMENT, **more)


@pytest.fixture
def versions(project: Project, tmp_path: Path, base: Path) -> list[int]:
    """Three of different weights."""
    folders = [adapters(tmp_path / f"of seed {seed}", base, weights=f"seed {seed}") for seed in range(3)]
    return [register(project, folder).version for folder in folders]


def champion(project: Project) -> int | None:
    found = registry.champion(project.uri, NAME)
    return None if found is None else found.version


def tags(project: Project, version: int) -> dict[str, str]:
    return dict(project.client.get_model_version(NAME, str(version)).tags)


def models(project: Project) -> list[Any]:
    """Of MLflow, those that versions are made of."""
    found = project.client.search_logged_models([project.experiment])
    return [model for model in found if model.name == registry.MODEL]


def outputs(project: Project, run_id: str | None) -> set[str]:
    """The models that MLflow shows with a run."""
    found = project.run(run_id).outputs
    assert found is not None
    return {output.model_id for output in found.model_outputs}


def test_a_version_has_the_adapter_its_card_and_where_it_comes_from(
    project: Project, base: Path, tmp_path: Path
) -> None:
    tracker = project.start()
    tracker.tags({"dvc.data/01_raw": "ab12", "result": "Better by 0.4."})
    tracker.finished()
    run_id = str(tracker.run_id)
    folder = adapters(tmp_path / "adapters", base, mlflow_run_id=run_id)
    made = register(project, folder, tags={"gate": "passed"})
    assert (made.version, made.run_id) == (1, run_id)
    assert made.tags == {
        "adapter.digest": adapter_digest(folder),
        "training.run": run_id,
        "git.commit": "c0ffee",
        "git.state": "clean",
        "dataset.digest": "d" * 64,
        "dvc.data/01_raw": "ab12",
        "base.model": str(base),
        "base.digest": "d1",
        "base.content": read_facts(folder)["model_content"],
        "command": ".venv/bin/kedro run",
        "gate": "passed",
    }
    here = made.adapters()
    assert sorted(path.name for path in here.iterdir()) == [
        *("README.md", "ar", "dit", "held_out.json", "training.csv", "training.json")
    ], "without the folders best and last"
    assert modules_of(here) == ["ar", "dit"]
    check_weights(here)
    assert "Better by 0.4." in (here / "README.md").read_text()
    assert project.client.get_model_version(NAME, "1").description == "Better by 0.4."
    [model] = models(project)
    assert (str(model.status), model.source_run_id) == ("READY", run_id)
    assert outputs(project, run_id) == {model.model_id}
    assert "champion" in project.client.get_registered_model(NAME).description


def test_a_version_says_what_it_takes_gives_and_needs(project: Project, trained: Path) -> None:
    location = Path(register(project, trained).location.removeprefix("file://"))
    model = yaml.safe_load((location / "MLmodel").read_text())
    assert model["flavors"]["python_function"]["loader_module"] == "visual_grpo.tracking.served_model"
    assert '"name": "image", "required": true' in model["signature"]["outputs"]
    assert '"name": "steps", "default": 10' in model["signature"]["params"]
    assert model["metadata"]["adapter.digest"] == adapter_digest(trained)
    assert "a held-out prompt" in (location / "input_example.json").read_text()
    needed = (location / "requirements.txt").read_text().split()
    assert {f"{name}=={__import__(name).__version__}" for name in ("diffusers", "mlflow")} < set(needed)
    assert not any(line.startswith("visual") for line in needed), "on no index: another's package might have the name"
    assert not (location / "pyproject.toml").exists()


def test_a_small_base_goes_with_the_version_and_of_a_large_one_its_place(
    project: Project, trained: Path, base: Path, tmp_path: Path
) -> None:
    small = Path(register(project, trained).location.removeprefix("file://")) / "data/visual_grpo"
    assert (small / "base/model.safetensors").read_bytes() == b"b" * 1000
    other = adapters(tmp_path / "other", base, weights="other")
    large = Path(register(project, other, base_copy_mb=0.001).location.removeprefix("file://")) / "data/visual_grpo"
    assert not (large / "base").exists()
    assert str(base) in (large / "served.json").read_text()


def test_the_same_weights_have_one_version_whatever_the_folder_is_called(
    project: Project, trained: Path, tmp_path: Path
) -> None:
    first = register(project, trained)
    copy = Path(shutil.copytree(trained, tmp_path / "copy"))
    (copy / "README.md").write_text("another card")
    shutil.rmtree(copy / "last")
    again = register(project, copy)
    assert (again, len(models(project))) == (first, 1)
    (trained / "dit" / MODULE_FILES["dit"]).write_text("changed")
    with pytest.raises(UserError, match="is not the file that the training left"):
        register(project, trained)


def crash(monkeypatch: pytest.MonkeyPatch, method: str, after: bool, command: Callable[[], Any]) -> None:
    """The command is killed just before or just after MLflow has done what it was asked."""
    real = getattr(MlflowClient, method)

    def dies(*arguments: Any, **named: Any) -> None:
        if after:
            real(*arguments, **named)
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, method, dies)
        # In this thread, which a kill ends.
        patch.setattr(registry_client.Server, "ask", lambda server, request: request(server.client))
        patch.setattr(registry_client.Server, "get", _get)
        with pytest.raises(SystemExit):
            command()


def _get(server: registry_client.Server, request: Callable[[MlflowClient], Any]) -> Any:
    try:
        return request(server.client)
    except mlflow.exceptions.MlflowException:
        return None


STEPS = (
    *("create_logged_model", "log_model_artifacts", "finalize_logged_model", "log_outputs"),
    *("create_registered_model", "create_model_version"),
)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_a_crash_at_any_step_leaves_one_version_after_the_next_attempt(
    project: Project, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    tracker = project.start()
    tracker.finished()
    folder = adapters(tmp_path / "adapters", base, mlflow_run_id=tracker.run_id)
    crash(monkeypatch, step, after, lambda: register(project, folder))
    made = register(project, folder)
    assert (made.version, champion(project)) == (1, None)
    assert len(project.client.search_model_versions(f"name = '{NAME}'")) == 1
    [model] = models(project)
    assert str(model.status) == "READY"
    assert outputs(project, tracker.run_id) == {model.model_id}
    check_weights(made.adapters())


def test_the_alias_moves_and_says_what_it_replaced(project: Project, versions: list[int]) -> None:
    assert champion(project) is None
    assert registry.promote(project.uri, NAME, 1) is None
    assert registry.promote(project.uri, NAME, 3) == 1
    assert (champion(project), tags(project, 1)["promotion.over"], tags(project, 3)["promotion.over"]) == (
        3,
        "none",
        "1",
    )
    before = tags(project, 3)
    assert registry.promote(project.uri, NAME, 3) == 1, "it is there already"
    assert tags(project, 3) == before
    assert registry.promote(project.uri, NAME, 2, alias="candidate") is None
    assert champion(project) == 3


def test_the_alias_goes_back_and_may_come_again(project: Project, versions: list[int]) -> None:
    for version in versions:
        registry.promote(project.uri, NAME, version)
    assert registry.rollback(project.uri, NAME) == (3, 2)
    assert champion(project) == 2
    assert "promotion.rolled_back" in tags(project, 3)
    assert registry.rollback(project.uri, NAME) == (2, 1)
    assert registry.promote(project.uri, NAME, 3) == 1
    assert (champion(project), tags(project, 3)["promotion.over"]) == (3, "1")
    assert "promotion.rolled_back" not in tags(project, 3)


def test_the_alias_is_moved_last(project: Project, versions: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    registry.promote(project.uri, NAME, 1)
    move = "set_registered_model_alias"
    crash(monkeypatch, move, False, lambda: registry.promote(project.uri, NAME, 2))
    assert (champion(project), tags(project, 2)["promotion.over"]) == (1, "1")
    assert registry.promote(project.uri, NAME, 2) == 1
    crash(monkeypatch, move, False, lambda: registry.rollback(project.uri, NAME))
    assert champion(project) == 2
    assert registry.rollback(project.uri, NAME) == (2, 1)


def test_there_may_be_nothing_to_go_back_to(project: Project, versions: list[int]) -> None:
    said = r"has no shapes@champion, so .* from\. shapes has the versions 1, 2, 3 .*promotion\.candidate=models:/"
    with pytest.raises(UserError, match=said):
        registry.rollback(project.uri, NAME)
    with pytest.raises(UserError, match=r"has no other@champion"):
        registry.rollback(project.uri, "other")
    registry.promote(project.uri, NAME, 1)
    with pytest.raises(UserError, match=r"version 1, which replaced no other"):
        registry.rollback(project.uri, NAME)
    registry.promote(project.uri, NAME, 2)
    project.client.delete_model_version(NAME, "1")
    with pytest.raises(UserError, match=r"replaced version 1, but that was deleted\. Promote one .* left \(2, 3\)"):
        registry.rollback(project.uri, NAME)
    assert champion(project) == 2
    with pytest.raises(UserError, match=r"has no version 9 of shapes, so it cannot become champion"):
        registry.promote(project.uri, NAME, 9)


def test_a_deleted_version_is_no_version_of_the_same_weights(project: Project, trained: Path) -> None:
    register(project, trained)
    project.client.delete_model_version(NAME, "1")
    assert register(project, trained).version == 2


def test_the_parameter_adapter_takes_a_version(project: Project, versions: list[int]) -> None:
    registry.promote(project.uri, NAME, 2)
    for uri, seed in ((f"models:/{NAME}@champion", 1), (f"models:/{NAME}/3", 2)):
        assert (find_adapters(uri, LATEST) / "ar" / MODULE_FILES["ar"]).read_text() == f"seed {seed} ar best"


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (f"models:/{NAME}@best", r"has no models:/shapes@best\. shapes has the versions 1, 2, 3 and the aliases none"),
        (f"models:/{NAME}/4", r"has no models:/shapes/4\. shapes has the versions 1, 2, 3"),
        ("models:/shape@champion", r"has no models:/shape@champion\. Did you mean 'shapes'\?"),
        ("models:/words@champion", r"Registered models are: shapes\."),
        ("models:/shapes", r"Expected models:/NAME@ALIAS, such as models:/visual_grpo@champion"),
        ("models:/shapes/latest", r"or models:/NAME/VERSION"),
    ],
)
def test_a_version_that_cannot_be_found_is_explained(
    project: Project, versions: list[int], named: str, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        find_adapters(named, LATEST)


def test_a_version_whose_files_are_gone_is_explained(project: Project, trained: Path) -> None:
    made = register(project, trained)
    shutil.rmtree(made.location.removeprefix("file://"))
    with pytest.raises(UserError, match=r"The files of models:/shapes/1 are gone"):
        made.adapters()


def test_nothing_is_registered_of_what_cannot_be_used(project: Project, trained: Path, base: Path) -> None:
    with pytest.raises(UserError, match=r"refuses this: .*cannot contain '/' or ':'"):
        registry.register(project.uri, "a/b", trained, experiment=EXPERIMENT)
    (base / "model.safetensors").write_bytes(b"other")
    with pytest.raises(UserError, match=r"trained on a base model with other files"):
        register(project, trained)
    shutil.rmtree(base)
    with pytest.raises(UserError, match=r"The base model .* is gone"):
        register(project, trained)
    assert project.client.search_registered_models() == []
    assert project.client.search_logged_models([project.experiment]) == []


def test_to_look_for_a_champion_makes_no_database(tmp_path: Path) -> None:
    assert registry.champion(f"sqlite:///{tmp_path / 'none.db'}", NAME) is None
    assert not (tmp_path / "none.db").exists()


@pytest.mark.parametrize("uri", ["", "mlruns", "file:///tmp/mlruns", "./mlruns"])
def test_a_folder_is_no_registry(uri: str) -> None:
    with pytest.raises(
        UserError, match=r"has no registry of models\. Expected a database, such as sqlite:///mlflow\.db"
    ):
        registry.champion(uri, NAME)


def test_a_locked_database_is_told_in_seconds_and_nothing_changes(project: Project, versions: list[int]) -> None:
    registry.promote(project.uri, NAME, 1)
    began = time.monotonic()
    with sqlite3.connect(project.database, isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(UserError, match=r"does not answer: .*database is locked"):
            registry.promote(project.uri, NAME, 2)
        other.execute("ROLLBACK")
    other.close()
    assert time.monotonic() - began < 2 * registry_client.WAIT
    assert champion(project) == 1


def test_a_server_that_is_away_or_hangs_is_told_in_seconds(
    project: Project, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://user:secret@127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(registry_client, "WAIT", 0.5)
        with pytest.raises(UserError, match=r"^MLflow \(http://127\.0\.0\.1:\d+\) has not answered in 0\.5 s") as hung:
            registry.register(uri, NAME, trained)
        assert "secret" not in str(hung.value)
    monkeypatch.setattr(registry_client, "WAIT", 20.0)
    with pytest.raises(UserError, match=r"does not answer: .*refused"):
        registry.register(uri, NAME, trained)


def test_an_error_that_is_not_mlflows_is_raised_as_it_is(project: Project) -> None:
    server = registry_client.Server(project.uri)
    for request in (server.ask, server.transfer):
        with pytest.raises(ZeroDivisionError):
            request(lambda _: 1 / 0)


def test_weights_whose_files_are_gone_are_uploaded_again(project: Project, trained: Path) -> None:
    first = register(project, trained)
    project.client.delete_model_version(NAME, str(first.version))
    shutil.rmtree(Path(first.location.removeprefix("file://")))
    again = register(project, trained)
    assert adapter_digest(again.adapters()) == adapter_digest(trained)


def test_a_version_whose_weights_were_changed_is_not_taken_for_what_was_registered(
    project: Project, trained: Path
) -> None:
    version = register(project, trained)
    folder = version.adapters()
    weights = next(folder.rglob("*.safetensors"))
    weights.write_bytes(weights.read_bytes() + b"x")
    facts = json.loads((folder / "training.json").read_text())
    facts["sums"] = weight_sums(folder)
    (folder / "training.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match=r"The weights of models:/shapes/1 in .* are not those that were registered"):
        version.adapters()
    assert version.adapters(whatever_they_are=True) == folder


def test_what_a_deleted_version_was_made_of_goes_too_unless_another_model_has_it(
    project: Project, tmp_path: Path, base: Path
) -> None:
    folders = [adapters(tmp_path / f"of seed {seed}", base, weights=f"seed {seed}") for seed in range(3)]
    made = [register(project, folder) for folder in folders]
    registry.register(project.uri, "another", folders[0], experiment=EXPERIMENT)
    assert delete_versions(project.uri, NAME, "champion", keep=1) == [1, 2]
    there = [Path(version.location.removeprefix("file://")).is_dir() for version in made]
    assert there == [True, False, True], "the first is a version of the other model too"
