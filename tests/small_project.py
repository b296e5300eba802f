"""A copy of this project whose configurations ask for little work, for tests that give it a user's commands.

The configurations of the released models name small models of the same classes, on the CPU. So the commands themselves
need not be changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
TINY: dict[str, Any] = {
    "starter": {"records_per_prompt": 1, "vae_steps": 2, "dit_steps": 2, "ar_steps": 2, "vl_steps": 2},
    "policy": {"signal_check": {"rollouts": 0}, "gradient_checkpointing": False},
    "grpo": {"steps": 2, "prompts_per_step": 2, "group_size": 2, "warmup_steps": 0},
    "evaluation": {"every": 1, "prompts": 2, "images_per_prompt": 1, "max_prompts": 2, "bootstrap_samples": 100},
    "tracking": {"checkpoint_every": 1, "images_every": 1},
}
SMALL = {"device": "cpu", "dtype": "float32", "options": {}}
FEW_STEPS = {"rollout": {"steps": 4}, "eval": {"steps": 4}}
RELEASED: dict[str, dict[str, Any]] = {
    "glm_image": {
        "model": SMALL | {"path": "data/06_models/base"},
        "data": {"height": 128, "width": 128},
        "sampling": FEW_STEPS,
    },
    "sd3": {"model": SMALL | {"path": "small_sd3"}, "data": {"height": 64, "width": 96}, "sampling": FEW_STEPS},
    "wan": {
        "model": SMALL | {"path": "small_wan"},
        "data": {"height": 64, "width": 96, "frames": 5},
        "sampling": FEW_STEPS,
    },
    "wan_i2v": {
        "model": SMALL | {"path": "small_wan_i2v"},
        "data": {"height": 64, "width": 96, "frames": 5},
        "sampling": FEW_STEPS,
    },
    "ltx": {
        "model": SMALL | {"path": "small_ltx"},
        "data": {"height": 64, "width": 96, "frames": 9},
        "sampling": FEW_STEPS,
    },
    "qwen2_5_vl": {
        "model": {"path": "small_qwen2_5_vl", "device": "cpu", "options": {"max_tokens": 6}},
        "data": {"height": 64, "width": 64},
        "rewards": {"negative_points": {"options": {"segmenter": {"path": "small_sam2", "device": "cpu"}}}},
    },
}


def project_copy(folder: Path) -> Path:
    """Every tracked file but the tests, and the environment; nothing has been run."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in tracked:
        if not name.startswith("tests/") and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "conf/local").mkdir(exist_ok=True)
    return folder


def small_project(folder: Path) -> Path:
    """`project_copy` with the small configurations."""
    project_copy(folder)
    for file in folder.glob("conf/*/parameters.yml"):
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
        tree = merged(merged(tree, TINY), RELEASED.get(file.parent.name, {}))
        file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return folder


def kept(project: Path) -> Path:
    """A copy of ``project``, which `restored` puts in its place again."""
    return Path(shutil.copytree(project, project.with_name("kept"), symlinks=True))


def restored(kept: Path) -> Path:
    """The project as it was when it was `kept`, where it was: MLflow refuses a copy in a different place."""
    project = kept.with_name("project")
    shutil.rmtree(project)
    return Path(shutil.copytree(kept, project, symlinks=True))


def paste(command: str, project: Path) -> subprocess.CompletedProcess[str]:
    """The line as a user would paste it into a shell in the project."""
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=project,
        env=environment(project),
        capture_output=True,
        text=True,
        check=False,
    )


def environment(project: Path) -> dict[str, str]:
    """That of a user who has just installed the project and activated it: nothing names this repository."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW", "KEDRO"))}
    path = f"{project / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"
    return kept | {"PYTHONPATH": str(project / "src"), "PATH": path}


def merged(below: Any, above: Any) -> Any:
    """Two trees, key by key; null in ``below`` stays, for it removes what conf/base has."""
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    return {**below, **{key: merged(below.get(key), value) for key, value in above.items()}}
