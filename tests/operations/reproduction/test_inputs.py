"""What a run read, brought into a worktree: what is there, what DVC has, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.evaluation.defaults import parameters
from tests.operations.reproduction.repositories import repository
from visual_grpo.common.digests import content_digest, file_digest
from visual_grpo.common.errors import UserError
from visual_grpo.config.places import place
from visual_grpo.data.manifest import RecordTable, write_manifest
from visual_grpo.operations.reproduction.repeat import parameters_to_repeat
from visual_grpo.operations.reproduction.worktree import _bring, _bring_reward_files, bring_inputs, checked_out

MODEL = "data/06_models/base/model.safetensors"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """With drawn data, a small base model and a baseline in another output folder than the worktree's."""
    folder = tmp_path / "project"
    for name in ("mine/01_raw/shapes/records.jsonl", "mine/base/model.safetensors", "mine/07_model_output/baseline/a"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(name)
    image = folder / "mine/05_model_input/images/1.png"
    image.parent.mkdir(parents=True)
    image.write_bytes(b"picture")
    row = {"id": "1", "prompt": "a cat", "split": "train", "target_image": "images/1.png"}
    row["target_sha256"] = hashlib.sha256(b"picture").hexdigest()
    write_manifest(folder / "mine/05_model_input/records.parquet", [row])
    return folder


def bring(project: Path, hashes: dict[str, str] | None = None, **changes: Any) -> list[str]:
    """The pipelines that run again in the worktree ``code``, for a run with the project as it was first."""
    starter = {"dataset": "mine/01_raw/shapes", "model": "mine/base"}
    tree = parameters(**({"output": "mine", "data": {"path": starter["dataset"]}, "starter": starter} | changes))
    own = tree.model_dump(mode="json")
    first, model = project.parent / "first", own["model"]["path"] or starter["model"]
    if not first.exists():
        shutil.copytree(project, first)
    facts: dict[str, Any] = {
        "data": RecordTable(first / "mine/05_model_input/records.parquet").digest,
        "model": model,
        "model_digest": "m",
        "model_content": content_digest(first / model),
        "parameters": own,
        **{f"dvc.{path}": digest for path, digest in (hashes or {}).items()},
    }
    if (lora := own["model"]["lora"]) is not None:
        facts["model_lora"] = file_digest(first / lora)
    if "rewards" in changes:
        facts["file of reward own: words"] = "ca978112ca1b"
    code = project.parent / "code"
    code.mkdir(exist_ok=True)
    places = {name: place(code / "data", name) for name in ("records", "baseline", "base_model")}
    lacking = bring_inputs(project, code, places, facts, parameters_to_repeat(facts))
    return [pipeline for pipeline, _, _ in lacking]


def test_what_is_still_the_runs_is_used_and_nothing_has_to_run(project: Path) -> None:
    code = project.parent / "code"
    assert bring(project) == []
    assert (code / "data/05_model_input/images/1.png").read_bytes() == b"picture"
    assert (code / "data/07_model_output/baseline/a").is_file()
    report = json.loads((code / "data/06_models/base_model.json").read_text())
    assert (report["model"], report["digest"]) == ("data/06_models/base", "m")
    (code / MODEL).write_text("changed")
    assert (project / "mine/base/model.safetensors").read_text() != "changed"


@pytest.mark.parametrize("damage", ["record", "gone", "base"])
def test_what_is_another_is_made_again(project: Path, damage: str) -> None:
    bring(project)
    shutil.rmtree(project.parent / "code")
    prepared = project / "mine/05_model_input"
    if damage == "record":
        write_manifest(prepared / "records.parquet", [{"id": "1", "prompt": "a dog", "split": "train"}])
    elif damage == "gone":
        shutil.rmtree(prepared)
    else:
        (project / "mine/base/model.safetensors").write_text("another")
    assert bring(project) == (["starter"] if damage == "base" else ["starter", "data_preparation"])
    assert (project.parent / "code" / MODEL).exists() is (damage != "base")


def test_own_data_and_an_own_model_are_linked_and_told_where_they_are_gone(project: Path) -> None:
    for name in ("photos", "models/mine"):
        (project / name).mkdir(parents=True)
        (project / name / "file").write_text(name)
    own: dict[str, Any] = {"data": {"path": "photos"}, "model": {"path": "models/mine"}}
    bring(project, **own)
    code = project.parent / "code"
    assert (code / "models/mine").is_symlink()
    shutil.rmtree(project / "mine/05_model_input")
    assert bring(project, **own) == ["starter", "data_preparation"]
    assert (code / "photos/file").read_text() == "photos"
    shutil.rmtree(code)
    shutil.rmtree(project / "photos")
    with pytest.raises(UserError, match=r"photos, which the run read, does not exist.*dvc pull"):
        bring(project, **own)
    bring(project, data={"path": "hf://datasets/someone/photos"}, model={"path": "someone/model"})


def test_what_lies_outside_of_the_project_is_linked_within_the_temporary_folder(tmp_path: Path) -> None:
    project = tmp_path / "projects/mine"
    state, outside = repository(project), Path("../../models/mine")
    (project / outside).mkdir(parents=True)
    read = words(project)
    (project / "words.txt").rename(project / "../words.txt")
    read["rewards"]["own"]["options"]["words"] = "../words.txt"
    facts = {"file of reward own: words": "ca978112ca1b"}
    with checked_out(project, state, b"") as worktree:
        _bring(project, worktree.code, str(outside), facts)
        _bring_reward_files(project, worktree.code, facts, {"output": "data", **read})
        for path in (outside, Path("../words.txt")):
            assert (worktree.code / path).resolve() == (project / path).resolve()
            assert Path(os.path.normpath(worktree.code / path)).is_relative_to(worktree.folder)
    assert (project / outside).is_dir()


def test_a_lora_of_the_base_model_is_brought_unless_it_has_changed(project: Path) -> None:
    (project / "theirs.safetensors").write_text("theirs")
    bring(project, model={"lora": "theirs.safetensors"})
    assert (project.parent / "code/theirs.safetensors").read_text() == "theirs"
    (project / "theirs.safetensors").write_text("other")
    with pytest.raises(
        UserError, match=r"model\.lora: theirs\.safetensors is not the LoRA .* was [0-9a-f]{12}, and is "
    ):
        bring(project, model={"lora": "theirs.safetensors"})


def dvc(project: Path, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "dvc", *words], cwd=project, check=True, capture_output=True)


@pytest.mark.slow
def test_data_that_were_replaced_come_from_dvc_and_its_remote(project: Path) -> None:
    photos = project / "photos"
    photos.mkdir()
    (photos / "1.png").write_text("first")
    dvc(project, "init", "-q", "--no-scm")
    dvc(project, "remote", "add", "-q", "-d", "store", "../store")  # Relative to the project's .dvc folder.
    dvc(project, "add", "-q", "photos")
    dvc(project, "push", "-q")
    hashes = {"photos": str(yaml.safe_load((project / "photos.dvc").read_text())["outs"][0]["md5"])}
    (photos / "1.png").unlink()
    (photos / "1.png").write_text("another")
    dvc(project, "add", "-q", "photos")
    shutil.rmtree(project / ".dvc/cache")
    bring(project, hashes, data={"path": "photos"})
    shutil.rmtree(project / "mine/05_model_input")
    bring(project, hashes, data={"path": "photos"})
    code = project.parent / "code"
    assert (code / "photos/1.png").read_text() == "first"
    assert (photos / "1.png").read_text() == "another"
    for gone in (code, project / ".dvc/cache", project.parent / "store"):
        shutil.rmtree(gone)
    with pytest.raises(UserError, match=rf"{hashes['photos']}\) is neither in DVC's cache nor in its remote"):
        bring(project, hashes, data={"path": "photos"})


def words(project: Path) -> dict[str, Any]:
    """A reward that reads a file which is in no commit."""
    (project / "words.txt").write_text("a")
    reward = {"function": "tests.evaluation.painter:brightness_by_words", "options": {"words": "words.txt"}}
    return {"rewards": {"own": reward}}


@pytest.mark.parametrize("committed", [None, "another", "a"])
def test_a_file_that_a_reward_reads_is_brought_where_the_commit_has_another(
    project: Path, committed: str | None
) -> None:
    read, file = words(project), project.parent / "code/words.txt"
    if committed is not None:
        file.parent.mkdir()
        file.write_text(committed)
    if committed == "a":
        (project / "words.txt").write_text("b")
    bring(project, **read)
    assert file.read_text() == "a"
    assert file.is_symlink() == (committed != "a")


@pytest.mark.parametrize("present", ["b", None])
def test_a_file_that_is_no_longer_what_a_reward_read_is_refused(project: Path, present: str | None) -> None:
    read = words(project)
    (project / "words.txt").unlink() if present is None else (project / "words.txt").write_text(present)
    with pytest.raises(UserError, match=r"words of reward own named .* ca978112ca1b in the run\. Present: "):
        bring(project, **read)
