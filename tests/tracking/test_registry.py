"""Versions of a registered model, and the alias that points to the champion, in a real MLflow database."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from contextlib import closing
from datetime import datetime, tzinfo
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
import yaml

from tests.evaluation.defaults import parameters
from tests.tracking.conftest import Project, crash, files_of
from tests.tracking.toy_adapters import MODULE_FILES, adapters, base_model
from visual_grpo.adapter_folder import adapter_digest, check_weights, modules_of, read_facts, weights_digest
from visual_grpo.common.errors import UserError
from visual_grpo.operations.lineage import DIFFERS, find_subject, lines
from visual_grpo.tracking import registry
from visual_grpo.tracking.adapter_lookup import Registered, find_adapters, find_start
from visual_grpo.tracking.registry import Registry, gate_settings

NAME = "shapes"
REGISTRY = Registry(NAME)
LATEST = Path("latest/adapters")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return base_model(tmp_path / "base")


@pytest.fixture
def trained(tmp_path: Path, base: Path) -> Path:
    return adapters(tmp_path / "adapters", base)


@pytest.fixture
def versions(project: Project, tmp_path: Path, base: Path) -> list[Registered]:
    """Three of different weights."""
    folders = [adapters(tmp_path / f"of seed {seed}", base, weights=f"seed {seed}") for seed in range(3)]
    return [REGISTRY.register(folder) for folder in folders]


def champion() -> int | None:
    found = REGISTRY.champion()
    return None if found is None else found.version


def model_tags(project: Project) -> dict[str, str]:
    return dict(project.client.get_registered_model(NAME).tags)


def outputs(project: Project, run_id: str | None) -> set[str]:
    """The models that MLflow shows with a run."""
    found = project.run(run_id).outputs
    assert found is not None
    return {output.model_id for output in found.model_outputs}


def test_a_version_has_the_adapter_its_card_and_where_it_comes_from(
    project: Project, base: Path, tmp_path: Path
) -> None:
    tracker = project.start()
    tracker.end("FINISHED")
    run_id = str(tracker.run_id)
    folder = adapters(tmp_path / "adapters", base, mlflow_run_id=run_id, **{"dvc.data/01_raw": "ab12"})
    made = REGISTRY.register(folder, ["Better by 0.4."], {"gate": "passed"})
    assert made.version == 1
    facts = read_facts(folder)
    assert made.tags == {
        **{name: facts[name] for name in ("git.commit", "git.state", "dvc.data/01_raw", "command")},
        "adapter.digest": adapter_digest(folder),
        "weights.digest": weights_digest(folder),
        "training.run": run_id,
        "dataset.digest": facts["data"],
        "base.model": str(base),
        "base.digest": "d1",
        "base.content": facts["model_content"],
        "gate": "passed",
    }
    here = made.adapters()
    assert sorted(path.name for path in here.iterdir()) == [
        *("README.md", "ar", "dit", "held_out.json", "training.csv", "training.json")
    ], "without the folders best and last"
    assert modules_of(here) == ["ar", "dit"]
    check_weights(here)
    assert "Better by 0.4." in (here / "README.md").read_text()
    version = project.client.get_model_version(NAME, "1")
    assert (version.description, version.run_id) == ("Better by 0.4.", run_id)
    model = project.client.get_logged_model(str(version.source).removeprefix("models:/"))
    assert (str(model.status), model.source_run_id) == ("READY", run_id)
    assert outputs(project, run_id) == {model.model_id}
    assert "champion" in project.client.get_registered_model(NAME).description


def test_a_version_says_what_it_takes_gives_and_needs_and_has_a_base_that_is_small(
    project: Project, trained: Path, base: Path, tmp_path: Path
) -> None:
    location = files_of(REGISTRY.register(trained))
    model = yaml.safe_load((location / "MLmodel").read_text())
    assert model["flavors"]["python_function"]["loader_module"] == "visual_grpo.tracking.served_model"
    assert '"name": "image", "required": true' in model["signature"]["outputs"]
    assert '"name": "steps", "default": 10' in model["signature"]["params"]
    assert model["metadata"]["adapter.digest"] == adapter_digest(trained)
    needed = (location / "requirements.txt").read_text().split()
    assert {f"{name}=={__import__(name).__version__}" for name in ("diffusers", "mlflow")} < set(needed)
    assert not any(line.startswith("visual") for line in needed), "on no index: another's package might have the name"
    assert not (location / "pyproject.toml").exists()
    assert (location / "data/visual_grpo/base/model.safetensors").read_bytes() == b"b" * 1000
    other = adapters(tmp_path / "other", base, weights="other")
    large = files_of(Registry(NAME, base_copy_mb=0.001).register(other))
    assert not (large / "data/visual_grpo/base").exists()
    assert f"base: {base}" in (large / "MLmodel").read_text()
    # A record that knows nothing of its base could name any folder of this machine.
    unknown = adapters(tmp_path / "unknown", base, weights="unknown", model_content=None)
    assert not (files_of(REGISTRY.register(unknown)) / "data/visual_grpo/base").exists()


def test_the_same_weights_have_one_version_whatever_the_folder_is_called(
    project: Project, trained: Path, tmp_path: Path
) -> None:
    first = REGISTRY.register(trained)
    copy = Path(shutil.copytree(trained, tmp_path / "copy"))
    (copy / "README.md").write_text("another card")
    shutil.rmtree(copy / "last")
    assert REGISTRY.register(copy) == first
    (trained / "dit" / MODULE_FILES["dit"]).write_text("changed")
    with pytest.raises(UserError, match="has changed since the training"):
        REGISTRY.register(trained)
    project.client.delete_model_version(NAME, "1")
    assert REGISTRY.register(copy).version == 2, "a deleted version is none of the same weights"


def test_crashes_at_any_step_leave_one_version_after_the_next_attempt(
    project: Project, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = project.start()
    tracker.end("FINISHED")
    folder = adapters(tmp_path / "adapters", base, mlflow_run_id=tracker.run_id)
    for step in ("create_registered_model", "log_model_artifacts", "create_model_version"):
        for after in (False, True):
            with pytest.raises(SystemExit), crash(monkeypatch, step, after):
                REGISTRY.register(folder)
    made = REGISTRY.register(folder)
    assert (made.version, champion()) == (1, None)
    check_weights(made.adapters())
    source = project.client.get_model_version(NAME, "1").source
    assert str(source).removeprefix("models:/") in outputs(project, tracker.run_id)


def test_old_versions_go_with_their_files_but_not_what_an_alias_names(
    project: Project, versions: list[Registered]
) -> None:
    folders = [files_of(version) for version in versions]
    REGISTRY.promote(1)
    assert REGISTRY.delete_old_versions(1) == [2]
    assert [folder.is_dir() for folder in folders] == [True, False, True]
    REGISTRY.promote(3)
    assert REGISTRY.delete_old_versions(1) == [], "a rollback goes to the first"


def test_the_alias_moves_goes_back_and_may_come_again(project: Project, versions: list[Registered]) -> None:
    assert champion() is None
    REGISTRY.promote(1)
    REGISTRY.promote(3)
    before = model_tags(project)
    assert (champion(), before) == (3, {"promoted.champion": "1, 3"})
    REGISTRY.promote(3)
    assert model_tags(project) == before, "it is there already"
    assert REGISTRY.rollback() == (3, 1)
    assert champion() == 1
    undone = str(REGISTRY.rolled_back(str(versions[2].weights)))
    assert undone.startswith("version 3, 20")
    assert undone in model_tags(project).values()
    assert REGISTRY.delete_old_versions(1) == [2]
    project.client.delete_model_version(NAME, "3")
    assert REGISTRY.rolled_back(str(versions[2].weights)) == undone, "whatever becomes of the version"


def test_a_version_that_comes_again_may_be_promoted_and_is_gone_back_to_once(
    project: Project, versions: list[Registered]
) -> None:
    for number in (1, 2, 3, 2):
        REGISTRY.promote(number)
    assert [REGISTRY.rollback() for _ in range(2)] == [(2, 3), (3, 1)]
    with pytest.raises(UserError, match=r"version 1, which did not replace a version"):
        REGISTRY.rollback()
    REGISTRY.promote(3)
    assert (REGISTRY.rolled_back(str(versions[2].weights)), REGISTRY.rollback()) == (None, (3, 1))


def test_each_alias_goes_back_by_its_own_promotions(project: Project, versions: list[Registered]) -> None:
    staging = Registry(NAME, alias="staging")
    for each, number in ((staging, 1), (REGISTRY, 2), (staging, 3), (REGISTRY, 3)):
        each.promote(number)
    assert REGISTRY.delete_old_versions(1) == [], "rollbacks go to the others"
    assert staging.rollback() == (3, 1)
    assert (champion(), REGISTRY.rolled_back(str(versions[2].weights))) == (3, None)
    assert REGISTRY.rollback() == (3, 2)


def test_promotions_are_read_that_were_noted_at_the_versions(project: Project, versions: list[Registered]) -> None:
    for number, over in (("1", "none"), ("2", "3"), ("3", "2")):  # The second replaced the first, and then the third.
        project.client.set_model_version_tag(NAME, number, "promotion.over", over)
    project.client.set_model_version_tag(NAME, "1", "promotion.rolled_back", "2026-01-01T00:00:00+00:00")
    project.client.set_registered_model_alias(NAME, "champion", "2")
    assert REGISTRY.rolled_back(str(versions[0].weights)) == "version 1, 2026-01-01T00:00:00+00:00"
    assert REGISTRY.delete_old_versions(1) == [], "or it would be forgotten"
    assert REGISTRY.rollback() == (2, 3)
    with pytest.raises(UserError, match=r"version 3, which did not replace a version"):
        REGISTRY.rollback()
    REGISTRY.promote(1)
    assert (REGISTRY.rolled_back(str(versions[0].weights)), REGISTRY.rollback()) == (None, (1, 3))


def test_the_alias_moves_last_and_in_a_locked_database_nothing_does(
    project: Project, versions: list[Registered], monkeypatch: pytest.MonkeyPatch
) -> None:
    REGISTRY.promote(1)
    with closing(sqlite3.connect(project.database, isolation_level=None)) as other, monkeypatch.context() as patch:
        # SQLite waits for 5 s otherwise.
        patch.setattr(sqlalchemy, "create_engine", partial(sqlalchemy.create_engine, connect_args={"timeout": 0.1}))
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(UserError, match=r"does not answer: .*database is locked"):
            REGISTRY.promote(2)
    assert champion() == 1
    move = "set_registered_model_alias"
    with pytest.raises(SystemExit), crash(monkeypatch, move, after=False):
        REGISTRY.promote(2)
    assert (champion(), model_tags(project)) == (1, {"promoted.champion": "1, 2"})
    REGISTRY.promote(2)
    with pytest.raises(SystemExit), crash(monkeypatch, move, after=False):
        REGISTRY.rollback()
    assert champion() == 2
    for uri, seed in ((f"models:/{NAME}@champion", 1), (f"models:/{NAME}/3", 2)):
        assert (find_adapters(uri, LATEST) / "ar" / MODULE_FILES["ar"]).read_text() == f"seed {seed} ar best"
    assert REGISTRY.rollback() == (2, 1)


def test_there_may_be_nothing_to_go_back_to(project: Project, versions: list[Registered]) -> None:
    with pytest.raises(UserError, match=r"has no models:/shapes@champion\. Its page lists"):
        REGISTRY.rollback()
    REGISTRY.promote(1)
    with pytest.raises(UserError, match=r"version 1, which did not replace a version"):
        REGISTRY.rollback()
    REGISTRY.promote(2)
    project.client.delete_model_version(NAME, "1")
    with pytest.raises(UserError, match=r"refuses this: .*version=1.* not found"):
        REGISTRY.rollback()
    assert champion() == 2


def test_a_version_that_cannot_be_found_is_explained(project: Project, trained: Path) -> None:
    REGISTRY.register(trained)
    for named, said in (
        (f"models:/{NAME}@best", r"has no models:/shapes@best\."),
        (f"models:/{NAME}/4", r"has no models:/shapes/4\."),
        ("models:/words@champion", r"has no models:/words@champion\. Its page lists"),
        ("models:/shapes/latest", r"Expected models:/NAME@ALIAS or models:/NAME/VERSION"),
    ):
        with pytest.raises(UserError, match=said):
            find_adapters(named, LATEST)


@pytest.mark.parametrize("edited", ["dit/pytorch_lora_weights.safetensors", "training.json"])
def test_a_version_whose_files_are_changed_or_gone_is_explained(project: Project, trained: Path, edited: str) -> None:
    made = REGISTRY.register(trained)
    file = made.adapters() / edited
    file.write_bytes(file.read_bytes() + b" ")
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"The adapters of models:/shapes/1 in .* are gone, or differ from what was regist"
        ):
            made.adapters()
        assert made.adapters(check=False).is_relative_to(files_of(made))
        shutil.rmtree(files_of(made), ignore_errors=True)


def test_nothing_is_registered_of_what_cannot_be_used(project: Project, trained: Path, base: Path) -> None:
    with pytest.raises(UserError, match=r"refuses this: .*cannot contain '/' or ':'"):
        Registry("a/b").register(trained)
    (base / "model.safetensors").write_bytes(b"other")
    with pytest.raises(UserError, match=r"trained on a base model whose files differ"):
        REGISTRY.register(trained)
    shutil.rmtree(base)
    with pytest.raises(UserError, match=r"The base model .* is gone"):
        REGISTRY.register(trained)
    assert project.client.search_registered_models() == []


@pytest.mark.parametrize("place", ["notes.txt", "ar/adapter_config.json", "best/deep", "pipe"])
def test_what_a_link_or_a_pipe_in_the_adapters_leads_to_is_not_registered(
    project: Project, trained: Path, tmp_path: Path, place: str
) -> None:
    key = tmp_path / "home/id_ed25519"
    key.parent.mkdir()
    key.write_text("private key")
    if place == "pipe":
        os.mkfifo(trained / place)
    else:
        (trained / place).symlink_to(key.parent if place == "best/deep" else key)
    with pytest.raises(UserError, match=f"{place} is a (link|pipe)"):
        REGISTRY.register(trained)
    assert project.client.search_registered_models() == []
    assert not list(tmp_path.rglob("mlartifacts"))


def test_a_base_model_with_links_is_named_and_not_copied(project: Project, trained: Path, base: Path) -> None:
    (base / "notes").symlink_to("/etc/hostname")
    files = files_of(REGISTRY.register(trained))
    assert not (files / "data/visual_grpo/base").exists()
    assert f"base: {base}" in (files / "MLmodel").read_text()


def test_gates_are_counted_once_for_each_adapter_and_settings(project: Project) -> None:
    for digest, settings in (("a" * 64, "s" * 64), ("a" * 64, "s" * 64), ("a" * 64, "t" * 64), ("b" * 64, "s" * 64)):
        REGISTRY.note_gate(digest, settings)
    assert REGISTRY.gates_in_last_year(excluding=("a" * 64, "s" * 64)) == 2
    assert REGISTRY.gates_in_last_year(excluding=("c" * 64, "s" * 64)) == 3
    assert (REGISTRY.is_judged("a" * 64, "t" * 64), REGISTRY.is_judged("b" * 64, "t" * 64)) == (True, False)
    gate = next(iter(project.client.get_registered_model(NAME).tags))
    project.client.set_registered_model_tag(NAME, gate, "2020-01-01T00:00:00+00:00")
    assert REGISTRY.gates_in_last_year(excluding=("c" * 64, "s" * 64)) == 2, "a year has 365 days"


def test_a_refusal_is_a_decision_that_counts_in_no_year(project: Project) -> None:
    counted = []
    for refused in (True, True, False, True):
        REGISTRY.note_gate("a" * 64, "s" * 64, refused=refused)
        counted.append(REGISTRY.gates_in_last_year(excluding=("", "")))
    assert counted == [0, 0, 1, 1]
    REGISTRY.note_gate("b" * 64, "s" * 64, refused=True)
    assert (REGISTRY.is_judged("b" * 64, "s" * 64), REGISTRY.is_judged("b" * 64)) == (True, False)


@pytest.mark.parametrize(
    ("changes", "is_other"),
    [
        ({"promotion": {"margin": 0.01}}, True),
        ({"evaluation": {"images_per_prompt": 3}}, True),
        ({"evaluation": {"seed": 1}}, True),
        ({"evaluation": {"every": 3}}, False),
        ({"promotion": {"alias": "other"}}, True),  # Its champion is another.
    ],
)
def test_a_gate_is_another_by_its_rule_and_its_samples(changes: dict[str, Any], is_other: bool) -> None:
    gates = {gate_settings(each.promotion, each.evaluation) for each in (parameters(), parameters(**changes))}
    assert len(gates) == 1 + is_other


def test_gates_that_a_wrong_clock_dates_count_until_a_year_after_it_is_right(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock(datetime):
        days = 0

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Clock:
            return cls.fromtimestamp(time.time() + cls.days * 86_400, tz)

    def gates(days: int, *noted: str) -> int:
        Clock.days = days
        for digest in noted:
            REGISTRY.note_gate(digest * 64, "s" * 64)
        return REGISTRY.gates_in_last_year(excluding=("z" * 64, "s" * 64))

    monkeypatch.setattr(registry, "datetime", Clock)
    project.client.create_registered_model(NAME)
    assert gates(-900, "a") == 1, "the clock is behind the model itself"
    assert REGISTRY.ahead_of_clock() is not None
    assert gates(0) == 1
    assert REGISTRY.ahead_of_clock() is None
    assert gates(0, "b") == 2
    assert gates(-900, "c", "d") == 4
    assert gates(100) == 4
    assert gates(364) == 4
    assert gates(366) == 2, "those without a date stay"
    assert gates(370, "e") == 3
    assert gates(734) == 3, "they have the date of the next"
    assert gates(736) == 0
    assert gates(0) == 5, "dates to come count"


def test_a_version_an_alias_and_a_folder_are_the_same_adapters(project: Project, trained: Path, tmp_path: Path) -> None:
    REGISTRY.promote(REGISTRY.register(trained).version)
    for named in ("shapes/1", "models:/shapes/1", "shapes@champion", str(trained)):
        about = find_subject(named, LATEST)
        assert about.title == ("shapes/1" if named != str(trained) else named)
        assert (adapter_digest(about.adapters), about.facts) == (adapter_digest(trained), read_facts(trained))
        assert DIFFERS not in {line.state for line in lines(about, tmp_path)}
    facts = find_subject("shapes/1", LATEST).adapters / "training.json"
    facts.write_text(facts.read_text().replace('"steps": 80', '"steps": 81'))
    found = {line.what: line for line in lines(find_subject("shapes/1", LATEST), tmp_path)}
    assert (found["version"].state, found["adapters"].state) == (DIFFERS, "ok")
    assert found["version"].why.startswith("MLflow has a different digest: weights, training.json")


def test_the_adapters_at_the_start_are_found_by_their_digest(project: Project, trained: Path, tmp_path: Path) -> None:
    REGISTRY.register(trained)
    wanted = adapter_digest(trained)
    assert find_start(str(trained), wanted, LATEST) == trained
    other = adapters(tmp_path / "other", tmp_path / "base", weights="other")
    found = find_start(str(other), wanted, LATEST)
    assert found != trained
    assert adapter_digest(found) == wanted, "the registered version has them"
    with pytest.raises(UserError, match=r"The adapters that the run started from .* are gone"):
        find_start(str(other), "0" * 64, LATEST)
