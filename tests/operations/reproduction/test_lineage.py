"""The lineage of adapters, checked against real git and MLflow, with one thing changed at a time."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from tests.hub import COMMIT, counted, hub, hub_at
from tests.operations.reproduction.repositories import commit, git, repository
from tests.tracking.toy_adapters import adapters, base_model
from visual_grpo.adapter_folder import FACTS, adapter_digest, read_facts, weight_sums
from visual_grpo.common.digests import file_digest
from visual_grpo.data.manifest import RecordTable, write_manifest
from visual_grpo.operations.lineage import DIFFERS, OK, UNKNOWN, Line, Subject, lines
from visual_grpo.tracking import run_context

NAME = "someone/thing"
HASH = "0123456789abcdef0123456789abcdef"
RAW = "data/01_raw/shapes"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    state = repository(folder)
    manifest = folder / "data/05_model_input/records.parquet"
    write_manifest(manifest, [{"id": "1", "prompt": "a cat", "split": "train"}])
    base_model(folder / "data/06_models/base")
    trained = adapters(folder / "adapters", folder / "data/06_models/base")
    known = read_facts(trained)
    facts = known | {
        "parameters": known["parameters"] | {"output": "data"},
        "git.commit": state,
        "data": RecordTable(manifest).digest,
        "model": "data/06_models/base",
        "sums": weight_sums(trained),
        f"dvc.{RAW}": HASH,
    }
    (trained / FACTS).write_text(json.dumps(facts))
    (folder / ".dvc").mkdir()  # A repository of DVC.
    (folder / "dvc.yaml").write_text(json.dumps({"stages": {"raw": {"cmd": "draw", "outs": [RAW]}}}))
    stages = {"raw": {"cmd": "draw", "outs": [{"path": RAW, "md5": HASH}]}}
    (folder / "dvc.lock").write_text(json.dumps({"schema": "2.0", "stages": stages}) + "\n")
    return folder


def subject(project: Path) -> Subject:
    folder = project / "adapters"
    facts = read_facts(folder)
    tags = {"git.commit": facts["git.commit"], "dataset.digest": facts["data"], "command": facts["command"]}
    registered = tags | {"adapter.digest": adapter_digest(folder)}
    return Subject(
        title="shapes/1", adapters=folder, facts=facts, version_tags=registered, run_id="r" * 32, run_tags=tags
    )


def states(project: Path, about: Subject | None = None) -> dict[str, Line]:
    return {line.what: line for line in lines(about or subject(project), project)}


def edit(project: Path, **changes: Any) -> None:
    file = project / "adapters" / FACTS
    file.write_text(json.dumps(read_facts(project / "adapters") | changes))


def test_what_is_as_it_was_is_ok(project: Path) -> None:
    found = states(project)
    checked = ("version", "adapters", "MLflow run", "command", "commit", "uncommitted changes", "data", "base model")
    assert {name: found[name].state for name in checked} == dict.fromkeys(checked, OK)
    assert found["commit"].why == "in main"
    assert (found[f"DVC {RAW}"].state, found[f"DVC {RAW}"].why) == (OK, "as DVC records it")
    assert DIFFERS not in {line.state for line in found.values()}


def test_results_may_be_outside_the_project(project: Path, tmp_path: Path) -> None:
    (project / "data").rename(tmp_path / "elsewhere")
    edit(project, parameters=read_facts(project / "adapters")["parameters"] | {"output": str(tmp_path / "elsewhere")})
    why = f"as {tmp_path / 'elsewhere/05_model_input/records.parquet'} has it"
    assert (states(project)["data"].state, states(project)["data"].why) == (OK, why)


def differing(project: Path, about: Subject | None = None) -> list[str]:
    return [name for name, line in states(project, about).items() if line.state == DIFFERS]


def test_an_edited_weight_is_named(project: Path) -> None:
    about = subject(project)
    (project / "adapters/ar/adapter_model.safetensors").write_text("edited")
    assert differing(project, about) == ["version", "adapters"]
    assert states(project, about)["adapters"].why == "ar/adapter_model.safetensors has changed since the training"


def test_other_facts_than_mlflow_has_are_named(project: Path) -> None:
    about = subject(project)
    edit(project, data="x", command="another")
    changed = replace(about, facts=read_facts(project / "adapters"))
    found = states(project, changed)
    assert found["version"].why == "its tags dataset.digest, command differ from training.json"
    assert found["MLflow run"].why == "its tags dataset.digest, command differ from training.json"
    assert differing(project, changed) == ["version", "MLflow run", "command"]


def test_data_that_went_on_are_no_difference(project: Path) -> None:
    write_manifest(project / "data/05_model_input/records.parquet", [{"id": "1", "prompt": "a dog", "split": "train"}])
    assert states(project)["data"].state == UNKNOWN
    assert differing(project) == []


def test_a_base_model_with_other_files_is_named(project: Path) -> None:
    (project / "data/06_models/base/model.safetensors").write_bytes(b"others")
    assert differing(project) == ["base model"]
    shutil.rmtree(project / "data/06_models/base")
    assert states(project)["base model"].state == UNKNOWN


def test_a_base_model_on_the_hub_is_known_by_its_commit(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "repository").mkdir()
    for file in ("model_index.json", "README.md"):
        (tmp_path / "repository" / file).write_text("{}")
    tree = read_facts(project / "adapters")["parameters"]
    edit(project, model=NAME, model_content=None, parameters=tree | {"model": tree["model"] | {"revision": COMMIT}})

    def found() -> tuple[str, str, str]:
        line = states(project)["base model"]
        return line.value, line.state, line.why

    shown = f"{NAME} at commit {COMMIT}"
    with hub_at("http://127.0.0.1:9"):
        assert found()[:2] == (shown, UNKNOWN)
    with hub(NAME, tmp_path / "repository", commit="f" * 40):
        assert found() == (shown, DIFFERS, "the hub no longer has this commit")
    with hub(NAME, tmp_path / "repository"):
        assert found() == (shown, OK, "the hub has this commit")
        huggingface_hub.snapshot_download(NAME, ignore_patterns="*.md")
    with counted() as requests:
        assert found() == (shown, OK, "the hub's cache has this commit")
    assert requests == []


def test_a_lora_in_the_base_model_is_known_by_its_content(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    tree = read_facts(project / "adapters")["parameters"]

    def state(named: str) -> str:
        model = tree["model"] | {"lora": named}
        edit(project, model_lora=file_digest(tmp_path / "kept"), parameters=tree | {"model": model})
        return states(project)["merged LoRA"].state

    (tmp_path / "repository").mkdir()
    for file in (project / "theirs.safetensors", tmp_path / "repository/theirs.safetensors", tmp_path / "kept"):
        file.write_bytes(b"theirs")
    on_hub = f"hf://{NAME}@{COMMIT}/theirs.safetensors"
    with hub_at("http://127.0.0.1:9"):
        assert (state("theirs.safetensors"), state(on_hub)) == (OK, UNKNOWN)
    with hub(NAME, tmp_path / "repository"):
        assert state(on_hub) == UNKNOWN, "nothing that a folder names is downloaded"
        huggingface_hub.hf_hub_download(NAME, "theirs.safetensors")
        assert state(on_hub) == OK
    (project / "theirs.safetensors").write_bytes(b"other")
    assert (state("theirs.safetensors"), state("gone.safetensors")) == (DIFFERS, UNKNOWN)


def test_a_commit_on_no_branch_is_named_and_one_elsewhere_cannot_be_checked(project: Path) -> None:
    git(project, "checkout", "-q", "--orphan", "other")
    commit(project)
    git(project, "branch", "-D", "main")
    assert differing(project) == ["commit"]
    edit(project, **{"git.commit": "0" * 40})
    assert states(project)["commit"].state == UNKNOWN
    assert "no such commit" in states(project)["commit"].why


def test_uncommitted_changes_apply_or_are_named(project: Path) -> None:
    (project / "src/code.py").write_text("a = 2\n")
    patch = run_context.changes(project)
    edit(project, **{"git.state": "dirty"})
    assert states(project)["uncommitted changes"].value == "lost"
    (project / "adapters/changes.diff").write_bytes(patch)
    assert states(project)["uncommitted changes"].state == OK
    (project / "adapters/changes.diff").write_bytes(patch.replace(b"a = 1", b"a = 9"))
    assert differing(project) == ["uncommitted changes"]
    assert (project / "src/code.py").read_text() == "a = 2\n"


def test_a_dvc_hash_counts_as_long_as_a_commit_has_it(project: Path) -> None:
    lock = project / "dvc.lock"
    lock.write_text(lock.read_text().replace(HASH, "f" * 32))
    assert differing(project) == [f"DVC {RAW}"]
    lock.write_text(lock.read_text().replace("f" * 32, HASH))
    commit(project)
    lock.write_text(lock.read_text().replace(HASH, "f" * 32))
    commit(project)
    found = states(project)[f"DVC {RAW}"]
    assert found.state == OK
    assert found.why.endswith("records it; it has changed since then")
    lock.unlink()
    git(project, "checkout", "-q", "--orphan", "other")
    git(project, "rm", "-q", "--cached", "dvc.lock")
    commit(project)
    git(project, "branch", "-D", "main")
    assert states(project)[f"DVC {RAW}"].state == UNKNOWN
