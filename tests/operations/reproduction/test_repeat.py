"""A training's code, environment and parameters in a separate folder, and what cannot be repeated."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from kedro.config import OmegaConfigLoader

from tests.evaluation.defaults import parameters
from tests.operations.reproduction.repositories import commit, git, repository
from tests.small_project import ROOT
from visual_grpo import provenance
from visual_grpo.adapter_folder import DATA_COMMIT
from visual_grpo.common.errors import UserError
from visual_grpo.config import Parameters
from visual_grpo.config.pipelines import ReproduceConfig
from visual_grpo.config.places import CATALOG
from visual_grpo.operations.reproduction.repeat import parameters_to_repeat, repeat
from visual_grpo.operations.reproduction.worktree import Worktree, checked_out, python_of, write_configuration
from visual_grpo.pipelines.reproduce import reproduce_training, require_match
from visual_grpo.tracking import run_context
from visual_grpo.tracking.run_context import RunContext

LOCK = "requirements.lock"
TREE = parameters().model_dump(mode="json")


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"git.commit": None}, "training.json names no commit"),
        ({"git.state": "dirty"}, "has no changes.diff any more"),
        ({}, "has no requirements.lock"),
        ({"resumed.git.commit": "later1\nlater2"}, "was resumed with different commit (later1, later2), so no single"),
        ({"resumed.source.digest": "b"}, "with different source files of this project (b), so"),
        ({"resumed.numerics": "torch 3"}, "different versions of libraries, or kind of processor (torch 3), so"),
        ({provenance.ADJUSTED: "grpo.steps: 2, 3 after step 2"}, "parameters (grpo.steps: 2, 3 after step 2), so"),
    ],
)
def test_a_training_that_cannot_be_repeated(tmp_path: Path, facts: dict[str, str | None], told: str) -> None:
    project = tmp_path / "project"
    state = repository(project)
    known = {"parameters": TREE, "git.commit": state, "git.state": "clean"} | facts
    (tmp_path / "training.json").write_text(json.dumps({k: v for k, v in known.items() if v}))
    with pytest.raises(UserError) as refused:
        repeat(tmp_path, ReproduceConfig(), project)
    assert told in str(refused.value)


def test_no_run_and_an_unknown_one_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name the training with run=ID"):
        reproduce_training(parameters(), RunContext(), tmp_path)
    with pytest.raises(UserError, match=r"has no training\.json"):
        reproduce_training(parameters(run=str(tmp_path)), RunContext(), tmp_path)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return tmp_path / "project"


def test_the_commit_with_its_changes_is_checked_out_and_the_working_tree_stays(project: Path) -> None:
    first = repository(project)
    (project / "src/code.py").write_text("a = 2\n")
    (project / "my_reward.py").write_text("b = 1\n")
    patch = run_context.changes(project)
    commit(project)
    (project / "src/code.py").write_text("a = 3\n")
    before = git(project, "status", "--porcelain")
    with checked_out(project, first, patch) as worktree:
        assert (worktree.code / "src/code.py").read_text() == "a = 2\n"
        assert (worktree.code / "my_reward.py").read_text() == "b = 1\n"
        assert git(worktree.code, "rev-parse", "HEAD") == first
    assert not worktree.folder.exists()
    assert git(project, "worktree", "list").count("\n") == 0
    assert (git(project, "status", "--porcelain"), (project / "src/code.py").read_text()) == (before, "a = 3\n")


def test_a_project_may_be_below_the_repositorys_root_and_no_hook_runs(project: Path, tmp_path: Path) -> None:
    (project / "below/src").mkdir(parents=True)
    (project / "below/src/file").write_text("x")
    state = repository(project)
    for name in ("file", "new"):
        (project / "below/src" / name).write_text("y")
    hook = project / ".git/hooks/post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    hook.chmod(0o755)
    with checked_out(project / "below", state, run_context.changes(project / "below")) as worktree:
        assert [(worktree.code / "src" / name).read_text() for name in ("file", "new")] == ["y", "y"]
    assert not (tmp_path / "ran").exists()


def test_another_commit_and_changes_that_do_not_apply_are_told_and_leave_nothing(project: Path) -> None:
    state = repository(project)
    (project / "src/code.py").write_text("a = 2\n")
    patch = run_context.changes(project).replace(b"a = 1", b"a = 9")
    for commit_of_run, said in (
        ("0" * 40, r"commit 0000.*cannot be restored.*git fetch --all"),
        (state, r"changes\.diff of its adapters, cannot be restored(?s:.)*src/code\.py"),
    ):
        with pytest.raises(UserError, match=said), checked_out(project, commit_of_run, patch):
            pass
    assert git(project, "worktree", "list").count("\n") == 0


UV = shutil.which("uv") or (ROOT / ".venv-tools/bin/uv").is_file()


@pytest.fixture
def worktree(tmp_path: Path) -> Worktree:
    """Code of a run with the same lock as the project beside it."""
    for name in ("project", "code"):
        (tmp_path / name).mkdir()
        (tmp_path / name / LOCK).write_text("# nothing\n")
    (tmp_path / "project/.venv-tools").symlink_to(ROOT / ".venv-tools")
    return Worktree(tmp_path, tmp_path / "code")


def python(worktree: Worktree) -> Path:
    return python_of(worktree, worktree.folder / "project", "3.11.7")


def test_with_the_same_lock_the_environment_is_the_present_one_and_without_one_it_is_not_known(
    worktree: Worktree,
) -> None:
    assert python(worktree) == Path(sys.executable)
    (worktree.code / LOCK).unlink()
    with pytest.raises(UserError, match=r"has no requirements\.lock"):
        python(worktree)


@pytest.mark.skipif(not UV, reason="uv is installed by make setup")
def test_another_lock_is_installed_into_an_environment_of_its_own(
    worktree: Worktree, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (worktree.code / LOCK).write_text("# nothing, too\n")
    found = python(worktree)
    assert found.is_relative_to(worktree.folder / "environment")
    assert found.exists()
    assert "differs from the present one" in capsys.readouterr().out
    shutil.rmtree(worktree.folder / "environment")
    monkeypatch.setenv("UV_OFFLINE", "1")
    (worktree.code / LOCK).write_text(f"no-such-package-here==1.0 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(UserError, match=r"cannot be installed(?s:.)*a network is needed(?s:.)*no-such-package-here"):
        python(worktree)


def tree(**changes: Any) -> dict[str, Any]:
    return parameters(**changes).model_dump(mode="json")


def test_the_runs_own_parameters_are_used_in_the_worktrees_own_folder() -> None:
    own = tree(seed=7, grpo={"steps": 3}, resume="auto", tracking={"checkpoints": "elsewhere", "tensorboard": "logs"})
    own["output"] = "~/mine"
    own["starter"] |= {"dataset": "~/mine/drawn", "model": "../beside/model"}
    own["data"] |= {"path": "~/mine/drawn"}
    repeated = parameters_to_repeat({"parameters": own})
    assert (repeated["seed"], repeated["grpo"]["steps"]) == (7, 3)
    assert (repeated["resume"], repeated["train"]["start"]) == ("never", "base")
    assert repeated["output"] == "data"
    assert repeated["starter"]["dataset"] == repeated["data"]["path"] == "data/01_raw/shapes"
    assert repeated["starter"]["model"] == "data/06_models/base"
    assert repeated["tracking"]["tensorboard"] is None
    assert repeated["tracking"]["checkpoints"] == "data/06_models/checkpoints"
    Parameters.model_validate(repeated)


def test_own_data_elsewhere_and_the_adapters_at_the_start_are_read_where_they_are(tmp_path: Path) -> None:
    own = tree(train={"start": "champion"}, data={"path": "/photos"})
    repeated = parameters_to_repeat({"parameters": own}, tmp_path)
    assert (repeated["train"]["start"], repeated["data"]["path"]) == (str(tmp_path), "/photos")


def test_a_dataset_of_the_hub_is_read_at_the_commit_of_the_run() -> None:
    own = tree(data={"path": "hf://datasets/acme/pictures", "revision": "main"})
    assert parameters_to_repeat({"parameters": own, DATA_COMMIT: "c" * 40})["data"]["revision"] == "c" * 40
    assert parameters_to_repeat({"parameters": own})["data"]["revision"] == "main"


def test_kedro_reads_the_tree_as_it_is_and_nothing_else(tmp_path: Path) -> None:
    conf = tmp_path / "code/conf/base"
    conf.mkdir(parents=True)
    (conf / "parameters.yml").write_text("seed: 1\nold: 1\n")
    moved = "adapters: {type: Folder, filepath: /mnt/adapters}\nevaluation: {type: JSON, filepath: e/f.json}\n"
    (conf / "catalog.yml").write_text("records: {type: P, filepath: '${output:}/r.parquet'}\n" + moved)
    own = {"output": "data", "seed": 3, "rewards": {"ours": {"options": {"text": "${oc.env:HOME}, ü"}}}}
    written, places = write_configuration(Worktree(tmp_path, tmp_path / "code"), own)
    loader = OmegaConfigLoader(str(written), base_env="base", default_run_env="local")
    assert loader["parameters"] == own
    inside = {"records": "r.parquet", "adapters": "moved/adapters", "evaluation": "moved/evaluation.json"}
    assert places == {name: tmp_path / "code/data" / path for name, path in inside.items()}
    catalog = yaml.safe_load((written / "base/catalog.yml").read_text())
    assert {name: entry["filepath"] for name, entry in catalog.items()} == {
        name: f"${{output:}}/{path}" for name, path in inside.items()
    }
    assert (conf / "parameters.yml").read_text() == "seed: 1\nold: 1\n"


KEDRO = """
import json, pathlib
data = pathlib.Path("data")
output = data / "06_models/adapters"
(output / "ar").mkdir(parents=True, exist_ok=True)
(output / "ar/adapter.safetensors").write_text("weights")
(output / "training.csv").write_text("step,reward/total\\n1,0.5\\n")
(output / "training.json").write_text(json.dumps(FACTS))
(data / "06_models/base_model.json").write_text('{"digest": "m"}')
(data / "08_reporting").mkdir(exist_ok=True)
(data / "08_reporting/data_preparation.json").write_text('{"digest": "PREPARED"}')
"""


@pytest.mark.parametrize("differing", [None, "adapter ar/adapter.safetensors", "data"])
def test_the_two_trainings_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], differing: str | None
) -> None:
    """With a stand-in for Kedro in the commit's code, and a base model that is on a hub."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    project, adapters = tmp_path / "project", tmp_path / "adapters"
    facts = {
        "parameters": TREE,
        "data": "d",
        "model": "someone/model",
        "model_digest": "m",
        "numerics": "python 3, torch 2, cpu x86",
        "source.digest": "s",
        "seed": 0,
        "command": "kedro run",
    }
    (project / "src/kedro").mkdir(parents=True)
    (project / "src/kedro/__init__.py").touch()
    (project / "src/kedro/__main__.py").write_text(
        KEDRO.replace("FACTS", repr(facts)).replace("PREPARED", "x" if differing == "data" else "d")
    )
    (project / "conf/base").mkdir(parents=True)
    shutil.copy(CATALOG, project / "conf/base/catalog.yml")
    (project / LOCK).touch()
    (project / "src/code.py").touch()
    git(project, "init", "-q")
    facts |= {"git.commit": commit(project), "git.state": "clean"}
    (adapters / "ar").mkdir(parents=True)
    (adapters / "ar/adapter.safetensors").write_text(
        "others" if differing == "adapter ar/adapter.safetensors" else "weights"
    )
    (adapters / "training.csv").write_text("step,reward/total\n1,0.5\n")
    (adapters / "training.json").write_text(json.dumps(facts))
    found = repeat(adapters, ReproduceConfig(), project)
    assert (found["matches"], found["difference"]) == (differing is None, differing), found["rows"]
    assert ("bit for bit" in found["sentence"]) is (differing is None)
    with pytest.raises(UserError, match=f"Not reproduced: {differing} was") if differing else nullcontext():
        require_match(found)
    assert ("Kept: " in capsys.readouterr().out) is (differing is not None)
