"""Every block of commands of README and docs is run as it stands, each in a small project in which `make demo` has run.

The project is a copy of this one whose configurations ask for little work. Those of the released models name small
models of the same classes, on the CPU. So the commands themselves need not be changed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.markdown import ROOT, Block, blocks, files_before

TINY: dict[str, Any] = {
    "starter": {"records_per_prompt": 1, "vae_steps": 2, "dit_steps": 2, "ar_steps": 2, "vl_steps": 2},
    "policy": {"signal_check": {"rollouts": 0}, "gradient_checkpointing": False},
    "grpo": {"steps": 2, "prompts_per_step": 2, "group_size": 2, "warmup_steps": 0},
    "evaluation": {
        "every": 1,
        "prompts": 2,
        "images_per_prompt": 1,
        "max_prompts": 2,
        "bootstrap_samples": 100,
    },
    "tracking": {"checkpoint_every": 1, "images_every": 1},
}
SMALL = {"device": "cpu", "dtype": "float32", "options": {}}
FEW_STEPS = {"rollout": {"steps": 4}, "stock": {"steps": 4}}
RELEASED: dict[str, dict[str, Any]] = {
    "glm_image": {
        "model": SMALL | {"path": "data/06_models/base"},
        "data": {"height": 128, "width": 128},
        "sampling": FEW_STEPS,
    },
    "sd3": {
        "model": SMALL | {"path": "small_sd3"},
        "data": {"height": 64, "width": 96},
        "sampling": FEW_STEPS,
    },
}
NOT_RUN = {
    "make": "its targets' commands are checked, and `make setup` would change the environment",
    ".venv/bin/jupyter": "a server",
    ".venv/bin/dvc": "needs a git repository; the stages' commands are checked in test_project.py",
    ".venv/bin/python benchmarks/": "hours; its arguments are checked in test_docs.py",
    ".venv/bin/pytest": "these tests",
    ".venv/bin/pre-commit": "changes the repository",
}
OF_THE_HUB = {"add_a_flow_model.md"}
"""Its Python names a model of the hub; test_add_a_flow_model.py runs it on a small one."""


def is_run(line: str) -> bool:
    return not line.startswith(tuple(NOT_RUN))


RUN = [block for block in blocks("console") if any(is_run(" ".join(words)) for words in block.commands)]
PYTHON = [b for b in blocks("python") if b.file is None and b.page.name not in OF_THE_HUB]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small project after its first whole run."""
    project = tmp_path_factory.mktemp("finished") / "project"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in tracked:
        if not name.startswith("tests/") and (ROOT / name).is_file():
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, project / name)
    (project / ".venv").symlink_to(sys.prefix)
    (project / "conf/local").mkdir(exist_ok=True)
    for file in project.glob("conf/*/parameters.yml"):
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
        tree = merged(merged(tree, TINY), RELEASED.get(file.parent.name, {}))
        file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    save_small_sd3(project / "small_sd3")
    shell(".venv/bin/kedro run", project)
    return project


@pytest.fixture
def project(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "project", symlinks=True))


@pytest.mark.slow
@pytest.mark.parametrize("block", RUN, ids=[block.where for block in RUN])
def test_a_block_of_commands_runs_alone(block: Block, project: Path) -> None:
    for name, text in files_before(block).items():
        (project / name).write_text(text, encoding="utf-8")
    for line in block.text.splitlines():
        command = line.removeprefix("$ ")
        if not line.startswith("$ ") or not is_run(command):
            continue
        if "FOLDER" in command:
            write_records(project, edits="task=i2i" in command)
        before = time.time()
        shell(command, project)
        for made in results_of(command):
            newest = max((file.stat().st_mtime for file in project.glob(f"data/**/{made}")), default=0)
            assert newest > before - 1, f"{command} left no {made}"


@pytest.mark.slow
@pytest.mark.parametrize("block", PYTHON, ids=[block.where for block in PYTHON])
def test_a_block_of_python_runs_alone(block: Block, project: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", block.text], cwd=project, env=environment(project), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


def results_of(command: str) -> list[str]:
    """Files that the command must have written."""
    if "kedro run" not in command:
        return []
    made = {
        "data_preparation": ["records.parquet"],
        "baseline": ["scores.parquet"],
        "train": ["training.csv"],
        "evaluate": ["evaluation.html"],
    }
    named = [name for name in made if f"--pipeline={name}" in command]
    return [file for name in named or made for file in made[name]] if named or "--pipeline" not in command else []


def shell(command: str, project: Path) -> str:
    """The line as a user would paste it into a shell in the project."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=project,
        env=environment(project),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout


def environment(project: Path) -> dict[str, str]:
    """That of a user who has just installed the project: nothing names this repository."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW", "KEDRO"))}
    return kept | {"PYTHONPATH": str(project / "src")}


def write_records(project: Path, *, edits: bool) -> None:
    """FOLDER: drawn shapes that every reward can judge, with a target, quoted text and, for edits, a source."""
    drawn = project / "data/01_raw/shapes"
    rows = [json.loads(line) for line in (drawn / "records.jsonl").read_text(encoding="utf-8").splitlines()]
    folder = project / "FOLDER"
    shutil.copytree(drawn / "target_images", folder / "target_images", dirs_exist_ok=True)
    chosen = [row | {"prompt": f'{row["prompt"]}, with the word "cat"'} for row in rows[::4]]
    if edits:
        chosen = [row | {"source_image": row["target_image"]} for row in chosen]
    (folder / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen), encoding="utf-8")


def save_small_sd3(folder: Path) -> None:
    from tests.policies.sd3 import tiny

    tiny.pipeline().save_pretrained(folder)


def merged(below: Any, above: Any) -> Any:
    """Two trees, key by key; null in ``below`` stays, for it removes what conf/base has."""
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    return {**below, **{key: merged(below.get(key), value) for key, value in above.items()}}


def test_what_is_not_run_is_little_and_said() -> None:
    lines = [" ".join(words) for block in blocks("console") for words in block.commands]
    assert all(any(line.startswith(prefix) for line in lines) for prefix in NOT_RUN), "all reasons are in use"
    assert len([line for line in lines if "kedro run" in line]) >= 20
    assert all(is_run(line) for line in lines if "kedro run" in line)
