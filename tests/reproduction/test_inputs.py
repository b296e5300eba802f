"""Data and base model of a run: those that are there, those that DVC has, or made again."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.evaluation.defaults import parameters
from visual_grpo.errors import UserError
from visual_grpo.records.table import RecordTable, write_manifest
from visual_grpo.reproduction.inputs import AGAIN, AS_IT_IS, FROM_DVC, bring_inputs
from visual_grpo.reproduction.repeat import parameters_to_repeat
from visual_grpo.saved_model import content_digest

OUTPUT = "data"
DRAWN = {"output": OUTPUT, "data": {"path": "data/01_raw/shapes"}}
STARTER = {"dataset": "data/01_raw/shapes", "model": "data/06_models/base"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """With one prepared record and a base model."""
    folder = tmp_path / "project"
    (folder / "data/05_model_input/images").mkdir(parents=True)
    image = folder / "data/05_model_input/images/1.png"
    image.write_bytes(b"picture")
    row = {"id": "1", "prompt": "a cat", "split": "train", "target_image": "images/1.png"}
    row["target_sha256"] = hashlib.sha256(b"picture").hexdigest()
    write_manifest(folder / "data/05_model_input/records.parquet", [row])
    (folder / "data/06_models/base").mkdir(parents=True)
    (folder / "data/06_models/base/model.safetensors").write_bytes(b"weights")
    return folder


class Inputs:
    """Those of a run with what the project has now."""

    def __init__(self, project: Path, hashes: dict[str, str] | None = None, **changes: Any) -> None:
        self.tree = parameters(**({**DRAWN, "starter": STARTER} | changes)).model_dump(mode="json")
        self.project, self.hashes, self.said = project, hashes or {}, list[str]()
        self.facts: dict[str, Any] = {
            "data": RecordTable(project / "data/05_model_input/records.parquet").digest,
            "model": self.tree["model"]["path"] or STARTER["model"],
            "model_digest": "m",
            "model_content": content_digest(project / "data/06_models/base"),
            "parameters": self.tree,
        }
        (project.parent / "code").mkdir(exist_ok=True)

    def bring(self) -> list[str]:
        """Where the data and the base model came from."""
        folder, tree = self.project.parent, parameters_to_repeat(self.tree)
        for left in folder.glob("dvc*"):
            shutil.rmtree(left)
        origins = bring_inputs(self.project, folder / "code", folder, self.facts, tree, self.hashes, self.said.append)
        return [origins["data"], origins["base model"]]


def test_what_is_there_is_used_and_nothing_has_to_run(project: Path) -> None:
    assert Inputs(project).bring() == [AS_IT_IS, AS_IT_IS]
    code = project.parent / "code/data"
    assert RecordTable(code / "05_model_input/records.parquet")[0].target_image == code / "05_model_input/images/1.png"
    assert (code / "05_model_input/images/1.png").read_bytes() == b"picture"
    report = json.loads((code / "06_models/starter.json").read_text())
    assert report == {**STARTER, "digest": "m", "content": content_digest(code / "06_models/base")}
    (code / "06_models/base/model.safetensors").write_bytes(b"changed")
    shutil.rmtree(project.parent / "code")
    assert (project / "data/05_model_input/images/1.png").read_bytes() == b"picture"
    assert (project / "data/06_models/base/model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize("damage", ["image", "record", "gone"])
def test_other_data_are_prepared_again(project: Path, damage: str) -> None:
    wanted = Inputs(project)
    prepared = project / "data/05_model_input"
    if damage == "image":
        (prepared / "images/1.png").write_bytes(b"another")
    elif damage == "record":
        write_manifest(prepared / "records.parquet", [{"id": "1", "prompt": "a dog", "split": "train"}])
    else:
        shutil.rmtree(prepared)
    assert wanted.bring() == [AGAIN, AS_IT_IS]
    assert not (project.parent / "code/data/05_model_input").exists()
    assert (project.parent / "code/data/06_models/base/model.safetensors").read_bytes() == b"weights"


def test_another_base_of_the_starter_is_pretrained_again(project: Path) -> None:
    wanted = Inputs(project)
    (project / "data/06_models/base/model.safetensors").write_bytes(b"others")
    assert wanted.bring() == [AS_IT_IS, AGAIN]


def test_a_given_model_is_only_read_and_its_change_is_refused(project: Path) -> None:
    shutil.copytree(project / "data/06_models/base", project / "models/mine")
    wanted = Inputs(project, model={"path": "models/mine"})
    assert wanted.bring() == [AS_IT_IS, AS_IT_IS]
    assert (project.parent / "code/models/mine").is_symlink()
    (project / "models/mine/model.safetensors").write_bytes(b"others")
    shutil.rmtree(project.parent / "code")
    with pytest.raises(UserError, match=r"models/mine, has other files now(?s:.)*dvc pull"):
        wanted.bring()


def test_ones_own_raw_data_are_read_and_told_where_they_are_gone(project: Path) -> None:
    own = {"data": {"path": "data/01_raw/mine"}}
    wanted = Inputs(project, **own)
    shutil.rmtree(project / "data/05_model_input")
    with pytest.raises(UserError, match=r"data/01_raw/mine does not exist(?s:.)*no prepared records(?s:.)*dvc pull"):
        wanted.bring()
    (project / "data/01_raw/mine").mkdir(parents=True)
    (project / "data/01_raw/mine/prompts.txt").write_text("a cat\n")
    assert wanted.bring() == [AGAIN, AS_IT_IS]
    assert (project.parent / "code/data/01_raw/mine/prompts.txt").read_text() == "a cat\n"


def dvc(project: Path, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "dvc", *words], cwd=project, check=True, capture_output=True)


@pytest.mark.slow
def test_data_that_were_replaced_come_from_dvc_and_its_remote(project: Path) -> None:
    prepared = project / "data/05_model_input"
    dvc(project, "init", "-q", "--no-scm")
    dvc(project, "remote", "add", "-q", "-d", "store", "../store")  # Relative to the project's .dvc folder.
    dvc(project, "add", "-q", "data/05_model_input/records.parquet", "data/05_model_input/images")
    dvc(project, "push", "-q")
    hashes = {f"data/05_model_input/{name}": _md5(prepared / f"{name}.dvc") for name in ("records.parquet", "images")}
    wanted = Inputs(project, hashes)
    shutil.rmtree(project / ".dvc/cache")
    (prepared / "images/1.png").unlink()
    (prepared / "images/1.png").write_bytes(b"another")
    assert wanted.bring() == [FROM_DVC, AS_IT_IS]
    assert (project.parent / "code/data/05_model_input/images/1.png").read_bytes() == b"picture"
    assert (prepared / "images/1.png").read_bytes() == b"another"

    shutil.rmtree(project.parent / "code")
    shutil.rmtree(project / ".dvc/cache")
    shutil.rmtree(project.parent / "store")
    assert wanted.bring()[0] == AGAIN
    assert hashes["data/05_model_input/images"] in wanted.said[1]
    assert "neither in DVC's cache nor in its remote" in wanted.said[1]


def _md5(file: Path) -> str:
    return str(yaml.safe_load(file.read_text())["outs"][0]["md5"])


def with_words(project: Path) -> Inputs:
    """Of a run whose reward reads a file that is in no commit."""
    (project / "words.txt").write_text("a")
    reward = {"function": "tests.evaluation.painter:brightness_by_words", "options": {"words": "words.txt"}}
    found = Inputs(project, rewards={"own": reward})
    found.facts = {**found.facts, "file of reward own: words": "ca978112ca1b"}
    return found


@pytest.mark.parametrize("committed", [None, "another", "a"])
def test_a_file_that_a_reward_reads_is_brought_where_the_commit_has_another(
    project: Path, committed: str | None
) -> None:
    wanted, file = with_words(project), project.parent / "code/words.txt"
    if committed is not None:
        file.write_text(committed)
    if committed == "a":
        (project / "words.txt").write_text("b")
    wanted.bring()
    assert file.read_text() == "a"
    assert file.is_symlink() == (committed != "a")


@pytest.mark.parametrize("present", ["b", None])
def test_a_file_that_is_no_longer_what_a_reward_read_is_refused(project: Path, present: str | None) -> None:
    wanted = with_words(project)
    (project / "words.txt").unlink() if present is None else (project / "words.txt").write_text(present)
    with pytest.raises(UserError, match=r"words of reward own named .* ca978112ca1b in the run\. Present: "):
        wanted.bring()
