"""The project in which faults are planted: finished once, and put back to that before each fault."""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import yaml

from tests.fault_cases import disk, forked
from tests.fault_cases.fault import TRAIN
from tests.small_project import environment, paste, small_project

QUICK = {
    "policy": {"train": "ar"},
    "sampling": {"stock": {"steps": 3}},
    "evaluation": {"controls": []},
    "reward": "shapes",
    "rewards": {"mine": {"function": "my_rewards:score", "weight": 0.5}},
}
REWARD = '''"""A reward whose code is always the same, and which fails as trouble.py says: as if it asked a server."""
from pathlib import Path

calls = []


def score(prompts, samples):
    calls.append(1)
    scores = [float(sample.float().mean()) / 255 for sample in samples]
    trouble = Path("trouble.py")
    scope = {"scores": scores, "samples": samples, "call": len(calls)}
    exec(trouble.read_text() if trouble.exists() else "", scope)
    return scope["scores"]
'''
FILES = {
    "base model": ("data/01_raw", "data/06_models/base"),
    "records": ("data/05_model_input", "data/08_reporting/data_preparation.json"),
    "baseline": ("data/07_model_output/baseline",),
    "adapters": ("data/06_models/adapters",),
    "evaluation": ("data/07_model_output/trained", "data/08_reporting/evaluation", "data/08_reporting/result.json"),
}
"""What a user would miss, by its name on the page."""
CHECKPOINTS, ROWS = "checkpoints", "MLflow's rows"
OF_TIME = ("seconds/", "speed/")
OF_THE_PLAN = ("watch_low/", "watch_high/")
"""Bounds of the hacking alarm: their level is that of the number of evaluations that the run was to have."""
VARIES = (*OF_TIME, "memory", *OF_THE_PLAN)
Curves = dict[str, list[tuple[str, int, float]]]
"""Of each MLflow run: (metric, step, value) of every row but those in `VARIES`, sorted."""


@dataclass(frozen=True)
class State:
    """Digests of what is there, and MLflow's rows."""

    files: dict[str, str]
    checkpoints: frozenset[str]
    curves: Curves
    waits: bool
    """Whether a spool holds what is not in MLflow."""
    trained: str
    """Digest of the adapters' weights and metrics without what differs between two equal runs."""


class World:
    """A project that is finished, with copies of how it was then."""

    def __init__(self, folder: Path) -> None:
        """Takes a minute: builds the model, prepares the data, trains and evaluates."""
        self.project, self._finished = folder / "project", folder / "finished"
        small_project(self.project)
        (self.project / "conf/local/parameters.yml").write_text(yaml.safe_dump(QUICK), encoding="utf-8")
        os.chdir(self.project)  # Where Kedro looks for its settings when it is imported.
        sys.path.insert(0, str(self.project / "src"))
        own = environment(self.project)
        os.environ.clear()
        os.environ.update(own | {"COLUMNS": "200"})  # Lines are not broken.
        (self.project / "my_rewards.py").write_text(REWARD, encoding="utf-8")
        from visual_grpo.third_party_output import silence_libraries

        silence_libraries()
        done = paste(".venv/bin/kedro run", self.project)
        assert done.returncode == 0, done.stdout + done.stderr
        shutil.copytree(self.project, self._finished, symlinks=True)
        modules = folder / "modules.txt"
        trained = forked.run(TRAIN, self.project, environment={forked.LIST_MODULES: str(modules)})
        assert trained.code == 0, trained
        self.without_fault = state(self.project)
        forked.preload(modules)

    def reset(self) -> None:
        """Everything but the code as it was when the project was finished."""
        os.chdir(self.project)
        disk.unmount_all(self.project)
        for path in self.project.iterdir():
            if path.name not in ("src", ".venv"):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for path in self._finished.iterdir():
            if path.is_dir() and path.name not in ("src", ".venv"):
                shutil.copytree(path, self.project / path.name)
            elif path.is_file():
                shutil.copy2(path, self.project / path.name)


def state(project: Path) -> State:
    database = project / "mlflow.db"
    return State(
        files={name: "".join(map(_digest, (project / path for path in paths))) for name, paths in FILES.items()},
        checkpoints=frozenset(_digest(path) for path in _checkpoints(project)),
        curves=_curves(database) if database.is_file() else {},
        waits=any(project.rglob("mlflow_spool/*/run.json")),
        trained=_trained(project / FILES["adapters"][0]),
    )


def _checkpoints(project: Path) -> Iterator[Path]:
    """Whole, damaged or put aside, wherever the tests let them be written."""
    for sums in project.glob("*/**/step-*"):
        if sums.is_dir() and not sums.name.startswith("."):
            yield sums


def _digest(path: Path) -> str:
    """Of a file, or of all in a folder with their names; "" of nothing."""
    found = hashlib.sha256()
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    for file in files:
        if file.is_file():
            found.update(str(file.relative_to(path)).encode() + file.read_bytes())
    return found.hexdigest() if path.exists() else ""


def _curves(database: Path) -> Curves:
    found: Curves = {}
    with closing(sqlite3.connect(database)) as opened, suppress(sqlite3.DatabaseError):
        rows = opened.execute("SELECT run_uuid, key, step, value FROM metrics ORDER BY run_uuid, key, step, value")
        for run, key, step, value in rows:
            if not any(part in key for part in VARIES):
                found.setdefault(run, []).append((key, step, value))
    return found


def _trained(adapters: Path) -> str:
    if not (adapters / "training.csv").is_file():
        return ""
    history = pd.read_csv(adapters / "training.csv")
    kept = [name for name in map(str, history) if not any(part in name for part in VARIES)]
    weights = b"".join(file.read_bytes() for file in sorted(adapters.rglob("*.safetensors")))
    return hashlib.sha256(history[kept].to_csv(index=False).encode() + weights).hexdigest()
