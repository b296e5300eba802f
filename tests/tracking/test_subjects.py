"""What a name on the command line means, in a real MLflow database with a registered version."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tracking.conftest import EXPERIMENT, Project
from tests.tracking.toy_adapters import adapters, base_model
from visual_grpo.errors import UserError
from visual_grpo.lineage import DIFFERS, lines
from visual_grpo.tracking import registry
from visual_grpo.tracking.lineage_lookup import start_of
from visual_grpo.tracking.model_ref import find_subject
from visual_grpo.trained_adapters import adapter_digest, read_facts

LATEST = Path("latest/adapters")


@pytest.fixture
def trained(project: Project, tmp_path: Path) -> Path:
    """The adapters of version 1 of ``shapes``."""
    folder = adapters(tmp_path / "adapters", base_model(tmp_path / "base"))
    registry.register(project.uri, "shapes", folder, experiment=EXPERIMENT)
    return folder


def test_a_version_an_alias_and_a_folder_are_the_same_adapters(project: Project, trained: Path, tmp_path: Path) -> None:
    project.client.set_registered_model_alias("shapes", "champion", "1")
    found = [find_subject(named, LATEST) for named in ("shapes/1", "models:/shapes/1", "shapes@champion")]
    assert [about.title for about in found] == ["shapes/1"] * 3
    assert {adapter_digest(about.adapters) for about in found} == {adapter_digest(trained)}
    folder = find_subject(str(trained), LATEST)
    assert (folder.adapters, folder.version_tags) == (trained, {})
    for about in found:
        assert about.facts == read_facts(trained)
        assert DIFFERS not in {line.state for line in lines(about, tmp_path)}


def test_a_version_whose_tags_were_changed_is_named(project: Project, trained: Path, tmp_path: Path) -> None:
    project.client.set_model_version_tag("shapes", "1", "dataset.digest", "another")
    found = {line.what: line for line in lines(find_subject("shapes/1", LATEST), tmp_path)}
    assert found["version"].why == "its tags dataset.digest are not as in training.json"
    assert (found["data"].state, found["data"].why) == (DIFFERS, "the version names other data")
    project.client.set_model_version_tag("shapes", "1", "adapter.digest", "another")
    found = {line.what: line for line in lines(find_subject("shapes/1", LATEST), tmp_path)}
    assert found["version"].why == "its weights are not those that were registered"


def test_a_version_that_is_not_there_is_told(project: Project, trained: Path) -> None:
    for named in ("shapes/2", "shapes@nobody", "shape@champion"):
        with pytest.raises(UserError, match="has no models:/"):
            find_subject(named, LATEST)


def test_the_adapters_at_the_start_are_found_by_their_digest(project: Project, trained: Path, tmp_path: Path) -> None:
    wanted = adapter_digest(trained)
    assert start_of(str(trained), wanted, LATEST) == trained
    other = adapters(tmp_path / "other", tmp_path / "base", weights="other")
    found = start_of(str(other), wanted, LATEST)
    assert found != trained
    assert adapter_digest(found) == wanted, "the registered version has them"
    with pytest.raises(UserError, match=r"train\.start=.*are not there any more"):
        start_of(str(other), "0" * 64, LATEST)
