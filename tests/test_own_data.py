"""`kedro run --params=data.path=FOLDER` for five kinds of folders, with a small model and few steps.

Each trains, or says in one message what to add; the lines of that message, pasted as they are, make it train.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.own_data import FOLDERS

ROOT = Path(__file__).parents[1]
GUARDS = {"edge_density": 0.0, "colour_entropy": 0.0}
FEW: dict[str, Any] = {
    "data": {"height": 64, "width": 64},
    "starter": {"records_per_prompt": 1, "vae_steps": 4, "dit_steps": 4, "ar_steps": 4},
    "policy": {"signal_check": {"rollouts": 0}},  # Of a model that has learned nothing there is none.
    "grpo": {"steps": 2, "prompts_per_step": 2, "group_size": 3},
    "sampling": {"eval": {"steps": 2}},
    "evaluation": {"every": 0, "prompts": 2, "images_per_prompt": 1, "max_prompts": 2, "bootstrap_samples": 100},
    "tracking": {"images_every": 0},
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, whose conf/local asks for little work."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "conf", folder / "conf")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "conf/local/parameters.yml").write_text(yaml.safe_dump(FEW))
    return folder


def paste(project: Path, lines: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": str(project / "src"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{project / 'mlflow.db'}",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "COLUMNS": "200",
    }
    return subprocess.run(
        ["bash", "-ec", lines], cwd=project, env=environment, capture_output=True, text=True, check=False
    )


def files(project: Path) -> dict[str, int]:
    """Every file and when it was last changed."""
    found = (path for path in project.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path): path.stat().st_mtime_ns for path in found}


def runs(project: Path) -> list[dict[str, str]]:
    """The parameters of every run in MLflow, oldest first."""
    if not (project / "mlflow.db").exists():
        return []
    with sqlite3.connect(project / "mlflow.db") as database:
        rows = database.execute(
            "SELECT run_uuid, key, value FROM runs JOIN params USING (run_uuid) ORDER BY start_time"
        ).fetchall()
    found: dict[str, dict[str, str]] = {}
    for run, key, value in rows:
        found.setdefault(run, {})[key] = value
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "lines", "reward", "weights"),
    [
        ("captions", None, "target", {"ssim": 1.0, **GUARDS}),
        ("image_folder", None, "target", {"ssim": 1.0, **GUARDS}),
        ("chinese", None, "target", {"ssim": 1.0, **GUARDS}),
        ("prompts", r"cat >> my_rewards.py(?s:.*?)\n\S*kedro run .*", "None", {"my_reward": 1.0, **GUARDS}),
        ("prompts", r"\S*kedro run .*colour_entropy.*", "None", {**GUARDS, "colour_entropy": 1.0}),
        ("edits", r"\S*kedro run .*", "edit", {"ssim": 1.0, "source_ssim": 0.0, **GUARDS}),
        ("instructions", r"\S*kedro run .*", "edit", {"ssim": 1.0, "source_ssim": 0.0, **GUARDS}),
    ],
)
def test_a_folder_trains_or_the_lines_of_the_message_make_it_train(project, tmp_path, kind, lines, reward, weights):
    folder = tmp_path / kind
    FOLDERS[kind](folder)
    before, runs_before = files(project), len(runs(project))
    done = paste(project, f"kedro run --params=data.path={folder}")
    if lines is not None:
        assert done.returncode == 1
        assert files(project) == before
        assert len(runs(project)) == runs_before
        assert "Traceback" not in done.stderr
        shown = re.search(lines, done.stderr)
        assert shown is not None, done.stderr
        done = paste(project, shown.group())
    assert done.returncode == 0, done.stdout + done.stderr
    [adapters] = project.glob(f"data/**/{kind}-*/06_models/adapters/training.json")
    assert json.loads(adapters.read_text())["steps"] == 2
    logged = runs(project)[-1]
    assert logged["data.path"] == str(folder)
    assert logged["reward"] == reward
    given = {name: float(logged[f"rewards.{name}.weight"]) for name in weights}
    assert given == weights
    assert sum(key.startswith("rewards.") and key.endswith(".weight") for key in logged) == len(weights)
    shutil.rmtree(adapters.parents[2])
    (project / "my_rewards.py").unlink(missing_ok=True)
