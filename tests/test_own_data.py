"""`kedro run --params=data.path=FOLDER` for five kinds of folders, with a small model and few steps.

Each trains, or says in one message what to add; the lines of that message, pasted as they are, make it train.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient

from tests.data.folders import FOLDERS, photo
from tests.small_project import paste, small_project

GUARDS = {"edge_density": 0.0, "colour_entropy": 0.0}
FEW: dict[str, Any] = {
    "data": {"height": 64, "width": 64},
    "grpo": {"group_size": 3},
    "sampling": {"eval": {"steps": 2}},
    "evaluation": {"every": 0},
    "tracking": {"images_every": 0},
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = small_project(tmp_path_factory.mktemp("own_data") / "project")
    (folder / "conf/local/parameters.yml").write_text(yaml.safe_dump(FEW))
    return folder


def files(project: Path) -> dict[str, int]:
    """Every file and when it was last changed."""
    found = (path for path in project.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path): path.stat().st_mtime_ns for path in found}


def runs(project: Path) -> list[dict[str, str]]:
    """The parameters of every run in MLflow, newest first."""
    if not (project / "mlflow.db").exists():
        return []
    client = MlflowClient(f"sqlite:///{project / 'mlflow.db'}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return [dict(run.data.params) for run in client.search_runs(experiments)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "lines", "weights"),
    [
        ("captions", None, {"ssim": 1.0, **GUARDS, "target_layout": 0.0}),
        ("image_folder", None, {"ssim": 1.0, **GUARDS, "target_layout": 0.0}),
        ("chinese", None, {"ssim": 1.0, **GUARDS, "target_layout": 0.0}),
        ("prompts", r"cat >> my_rewards.py(?s:.*?)\n\S*kedro run .*", {"my_reward": 1.0, **GUARDS}),
        ("prompts", r"\S*kedro run .*colour_entropy.*", {**GUARDS, "colour_entropy": 1.0}),
        ("edits", r"\S*kedro run .*", {"ssim": 1.0, "source_ssim": 0.0, **GUARDS, "target_layout": 0.0}),
        ("instructions", r"\S*kedro run .*", {"ssim": 1.0, "source_ssim": 0.0, **GUARDS, "target_layout": 0.0}),
    ],
)
def test_a_folder_trains_or_the_lines_of_the_message_make_it_train(project, tmp_path, kind, lines, weights):
    folder = tmp_path / kind
    FOLDERS[kind](folder)
    runs_before, before = len(runs(project)), files(project)
    done = paste(f"export COLUMNS=200; kedro run --params=data.path={folder}", project)
    if lines is not None:
        assert done.returncode == 1
        assert files(project) == before
        assert len(runs(project)) == runs_before
        assert "Traceback" not in done.stderr
        shown = re.search(lines, done.stderr)
        assert shown is not None, done.stderr
        done = paste(shown.group(), project)
    assert done.returncode == 0, done.stdout + done.stderr
    [adapters] = project.glob(f"data/**/{kind}-*/06_models/adapters/training.json")
    assert json.loads(adapters.read_text())["steps"] == 2
    logged = runs(project)[0]
    assert logged["data.path"] == str(folder)
    assert logged["reward"] == "listed", "each by its weight"
    given = {name: float(logged[f"rewards.{name}.weight"]) for name in weights}
    assert given == weights
    assert sum(key.startswith("rewards.") and key.endswith(".weight") for key in logged) == len(weights)
    shutil.rmtree(adapters.parents[2])
    (project / "my_rewards.py").unlink(missing_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "shares", "said"),
    [
        (1, "", "Note: 1 record: 1 train, 0 eval, 0 held out. 1 independent prompt is too few to hold any out"),
        (3, ",data.held_out_share=0,data.eval_share=0", "3 train, 0 eval, 0 held out. data.held_out_share is 0, so"),
    ],
)
def test_where_nothing_is_held_out_the_run_trains_and_says_that_it_is_not_judged(
    project, tmp_path, count, shares, said
):
    for number in range(count):
        photo(tmp_path / f"few/{number}.png", number)
        (tmp_path / f"few/{number}.txt").write_text(f"a thing {number}", encoding="utf-8")
    done = paste(f"export COLUMNS=200; kedro run --params=data.path={tmp_path / 'few'}{shares}", project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.index(said) < done.stdout.index(": build_starter")
    assert "Nothing was held out, so there is nothing to judge the trained model by." in done.stdout
    [evaluation] = project.glob("data/few-*/08_reporting/evaluation/evaluation.json")
    assert json.loads(evaluation.read_text())["headline"]["verdict"] == "not judged"
    shutil.rmtree(evaluation.parents[2])
