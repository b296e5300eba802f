"""DVC's real commands on a small project: what runs again, what comes from the cache, what goes on after a kill."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.small_project import environment, merged, small_project
from tests.test_kill import adapters

pytestmark = pytest.mark.slow
AUTHOR = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
FIRST_CHECKPOINT = "visual_grpo.grpo.checkpoint:remove_old:0"
PARAMETERS = "conf/base/parameters.yml"


def call(project: Path, line: str, *, fails: bool = False, **variables: str) -> str:
    """What a command prints; without ``fails`` it must succeed."""
    own = environment(project) | AUTHOR | variables
    done = subprocess.run(["bash", "-c", line], cwd=project, env=own, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert (done.returncode != 0) == fails, said[-3000:]
    return said


def repro(project: Path, what: str = "", **options: Any) -> tuple[list[str], str]:
    """The stages that ran, beside the first, which always does, and everything that was printed."""
    said = call(project, f".venv/bin/dvc repro {what}", **options)
    ran = re.findall(r"^Running stage '(?:\S+:)?(\w+)'", said, re.MULTILINE)
    return [name for name in ran if name != "parameters"], said


def change(file: Path, changes: dict[str, Any]) -> None:
    """Writes changes into a file of parameters."""
    tree = merged(yaml.safe_load(file.read_text(encoding="utf-8")), changes)
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project under git whose baseline has been drawn by DVC."""
    project = small_project(tmp_path_factory.mktemp("dvc") / "prepared")
    call(project, "git init -q -b main && git add -A && git commit -qm small")
    ran, _ = repro(project, "baseline")
    assert ran == ["starter", "data_preparation", "baseline"]
    return project


@pytest.fixture
def project(prepared: Path, tmp_path: Path) -> Path:
    shutil.copytree(prepared, tmp_path / "project", symlinks=True)
    return tmp_path / "project"


def test_only_what_changed_runs_and_a_fresh_clone_trains_nothing(project: Path, tmp_path: Path) -> None:
    ran, _ = repro(project)
    assert ran == ["train", "evaluate"]
    assert repro(project)[0] == []
    assert call(project, "git status --porcelain") == "?? dvc.lock\n"
    call(project, "git add dvc.lock && git commit -qm built")
    result = (project / "data/08_reporting/result.json").read_bytes()

    change(project / PARAMETERS, {"evaluation": {"bootstrap_samples": 200}})
    assert repro(project)[0] == ["evaluate"]
    change(project / PARAMETERS, {"evaluation": {"bootstrap_samples": 100}})
    ran, said = repro(project)
    assert ran == []
    assert "Stage 'evaluate' is cached - skipping run, checking out outputs" in said
    assert (project / "data/08_reporting/result.json").read_bytes() == result

    call(project, f".venv/bin/dvc remote add -d store {tmp_path / 'store'} && .venv/bin/dvc push")
    call(project, "git commit -qam remote")
    clone = tmp_path / "clone"
    call(tmp_path, f"git clone -q {project} {clone}", PYTHONPATH="")
    (clone / ".venv").symlink_to(sys.prefix)
    call(clone, ".venv/bin/dvc pull")
    assert call(clone, ".venv/bin/dvc status") == "parameters:\n\talways changed\n"
    assert repro(clone)[0] == []
    assert adapters(clone) == adapters(project)


def test_metrics_and_plots_show_the_result(project: Path) -> None:
    repro(project)
    [metrics] = json.loads(call(project, ".venv/bin/dvc metrics show --json"))[""]["data"].values()
    assert {"gain", "low", "high"} <= metrics["data"].keys()
    call(project, ".venv/bin/dvc plots show --out shown")
    page = (project / "shown/index.html").read_text(encoding="utf-8")
    assert len(re.findall(r"<img ", page)) == 2, "pictures, since charts would need scripts of the network"


def test_a_training_that_was_killed_goes_on_and_ends_with_the_same_adapter(project: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(project, whole, symlinks=True)
    _, said = repro(whole, "train")
    assert "Starting at step 1: data/06_models/checkpoints has no checkpoint" in said
    killer = str(Path(__file__).parent / "killer")
    path = f"{killer}:{environment(project)['PYTHONPATH']}"
    _, said = repro(project, "train", fails=True, KILL_AT=FIRST_CHECKPOINT, PYTHONPATH=path)
    assert "Resuming" not in said
    assert not (project / "data/06_models/adapters").exists()
    ran, said = repro(project, "train")
    assert ran == ["train"]
    assert "Resuming after step 1 of 2 from data/06_models/checkpoints/step-000001" in said
    assert adapters(project) == adapters(whole)
    # And a forced one is a new training, as is one with another seed.
    _, said = repro(project, "--force --single-item train")
    assert "Starting at step 1: the training of the checkpoints in data/06_models/checkpoints is finished" in said
    assert adapters(project) == adapters(whole)
    call(project, "sed -i 's/^train_params:.*/train_params: seed=7/' params.yaml")
    _, said = repro(project, "train", fails=True, KILL_AT=FIRST_CHECKPOINT, PYTHONPATH=path)
    call(project, "sed -i 's/^train_params:.*/train_params: seed=8/' params.yaml")
    ran, said = repro(project, "train")
    assert ran == ["train"]
    assert "belong to a different training: seed (was 7, is 8)" in said
    assert adapters(project) != adapters(whole)


def test_an_experiment_with_another_parameter_runs_and_is_shown(project: Path) -> None:
    repro(project)
    call(project, "git add -A && git commit -qm built")
    changed = "evaluation.images_per_prompt=2"
    said = call(project, f".venv/bin/dvc exp run -n more -S '{PARAMETERS}:{changed}'")
    assert "Running stage 'baseline'" in said
    rows = list(csv.DictReader(call(project, ".venv/bin/dvc exp show --csv").splitlines()))
    column = "baseline.evaluation.images_per_prompt"  # DVC names the file only where two have the same parameter.
    images = {row["Experiment"] or row["rev"]: row[column] for row in rows}
    assert images == {"workspace": "2", "main": "1", "more": "2"}
    assert all(float(row["trained"]) for row in rows)


def test_another_environment_and_own_data_have_their_own_stages(project: Path) -> None:
    (project / "photos").mkdir()
    lines = [json.dumps({"id": f"r{i}", "prompt": f"a {word} thing"}) for i, word in enumerate("abcdefghijkl")]
    records = project / "photos/records.jsonl"
    records.write_text("\n".join(lines), encoding="utf-8")
    call(project, "cp -r conf/sd3_small conf/mine && .venv/bin/dvc add -q photos")
    file = project / "conf/mine/parameters.yml"
    change(file, {"data": {"path": "photos"}, "rewards": {"jpeg_size": {"weight": 1.0}}})
    prepare = "conf/mine/dvc.yaml:data_preparation"
    call(project, ".venv/bin/python -m visual_grpo.operations.retraining.project --env=mine")
    assert repro(project, prepare)[0] == ["data_preparation"], "no model is made for data that may be refused"
    [table] = project.glob("data/mine/photos-*/05_model_input/records.parquet")
    assert f"path: {table.relative_to(project)}" in (project / "conf/mine/dvc.lock").read_text(encoding="utf-8")
    assert repro(project, prepare)[0] == []
    records.write_text("\n".join([*lines, json.dumps({"prompt": "more"})]), encoding="utf-8")
    assert repro(project, prepare)[0] == ["data_preparation"], "DVC sees the data"
    (project / "photos").rename(project / "pictures")
    change(file, {"data": {"path": "pictures"}})
    _, said = repro(project, "conf/mine/dvc.yaml:parameters", fails=True)
    assert "conf/mine/params.yaml was out of date and has been updated: run the command again" in said
    assert repro(project, "dvc.yaml:baseline")[0] == [], "the default's stages are as they were"
