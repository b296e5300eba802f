"""Each fault of docs/experiments/faults.md is planted in a finished project; its command ends as the page says."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.small_project import ROOT, kept, paste, restored, small_project
from visual_grpo.common.digests import tree_digest

CHECKPOINTS, BASELINE = "data/06_models/checkpoints", "data/07_model_output/baseline"
PARTS = ("data/06_models/adapters", "data/06_models/base", BASELINE, "data/05_model_input", "data/08_reporting")
"""What a user would miss, beside the checkpoints."""
QUICK = {
    "policy": {"train": "ar"},
    "sampling": {"eval": {"steps": 3}},
    "evaluation": {"controls": []},
    "reward": "shapes",
    "rewards": {"mine": {"function": "my_rewards:score", "weight": 0.5}},
}
REWARD = """import pathlib

def score(prompts, samples):
    scores = [float(sample.float().mean()) / 255 for sample in samples]
    trouble = pathlib.Path("trouble.py")
    scope = {"scores": scores}
    exec(trouble.read_text() if trouble.exists() else "", scope)
    return scope["scores"]
"""
TRAIN = "--pipeline=train --params=grpo.steps=3"
RESUME = "--pipeline=train --params=resume=auto,grpo.steps=3"
EVALUATE = "--pipeline=evaluate"
PREPARE = "--pipeline=data_preparation --params=data.path=mine"
Edit = Callable[[Path], object]


def flip(pattern: str) -> Edit:
    """Flips one bit of the largest file that fits."""

    def edit(project: Path) -> None:
        file = max(project.glob(pattern), key=lambda file: file.stat().st_size)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)

    return edit


def halve(name: str) -> Edit:
    return lambda project: os.truncate(project / name, (project / name).stat().st_size // 2)


def remove(name: str) -> Edit:
    return lambda project: shutil.rmtree(project / name) if (project / name).is_dir() else (project / name).unlink()


def write(name: str, text: str) -> Edit:
    def edit(project: Path) -> None:
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(text, encoding="utf-8")

    return edit


def damage_all(project: Path) -> None:
    for name in ("1", "2"):
        flip(f"{CHECKPOINTS}/step-00000{name}/state.safetensors")(project)


FAULTS: dict[str, tuple[str, Edit | None]] = {
    "One bit of the newest checkpoint is flipped": (RESUME, flip(f"{CHECKPOINTS}/step-000002/*")),
    "A file of the newest checkpoint is gone": (RESUME, remove(f"{CHECKPOINTS}/step-000002/facts.json")),
    "Every checkpoint is damaged": (RESUME, damage_all),
    "`resume` names a folder without a checkpoint": ("--pipeline=train --params=resume=data/01_raw", None),
    "A resumed run is given another learning rate": (f"{RESUME},grpo.learning_rate=0.1", None),
    "One bit of the adapters is flipped": (EVALUATE, flip("data/06_models/adapters/ar/*.safetensors")),
    "The adapters are gone": (EVALUATE, remove("data/06_models/adapters")),
    "`adapter` names no run": (f"{EVALUATE} --params=adapter=nosuchrun", None),
    "The baseline is gone": (TRAIN, remove(BASELINE)),
    "The baseline's table is half gone": (TRAIN, halve(f"{BASELINE}/scores.parquet")),
    "The records' table is half gone": (TRAIN, halve("data/05_model_input/records.parquet")),
    "One bit of the base model is flipped": (EVALUATE, flip("data/06_models/base/**/*.safetensors")),
    "`06_models/base_model.json` is half gone": (TRAIN, halve("data/06_models/base_model.json")),
    "A reward raises at its first call": (TRAIN, write("trouble.py", "raise KeyError('colour')")),
    "A reward gives NaN for all samples": (TRAIN, write("trouble.py", "scores = [float('nan') for _ in scores]")),
    "A reward ends the program": (TRAIN, write("trouble.py", "raise SystemExit(0)")),
    "A reward's file imports what is not there": (TRAIN, write("my_rewards.py", "import no_such_package")),
    "A reward's code is edited after the baseline": (TRAIN, write("my_rewards.py", REWARD.replace("255", "256"))),
    "The learning rate is absurd, and the loss becomes NaN": (f"{TRAIN},grpo.learning_rate=1e30", None),
    "The folder of data does not exist": (PREPARE, None),
    "The folder of data has nothing in it": (PREPARE, lambda project: (project / "mine").mkdir()),
    "No file may have more than 300 kB (`ulimit -f`)": (TRAIN, None),
    "A parameter is misspelt": ("--pipeline=train --params=grpo.stepz=3", None),
    "A number is a word": ("--pipeline=train --params=grpo.steps=many", None),
    "`conf/local/parameters.yml` is no YAML": (TRAIN, write("conf/local/parameters.yml", "grpo: [1\n")),
    "An environment does not exist": ("--env=glm_imag", None),
    "A pipeline does not exist": ("--pipeline=trian", None),
    "The GPU does not exist": (f"{TRAIN},model.device=cuda:99", None),
}
"""A row of the page -> the options of ``kedro run``, and what is done to the project before."""
TEXT = (ROOT / "docs/experiments/faults.md").read_text(encoding="utf-8")
PAGE = {
    what: (int(code), says) for what, code, says in re.findall(r"^\| (.+) \| (\d) \| `(.+)` \|$", TEXT, re.MULTILINE)
}
"""Row -> exit code and what the message has."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = small_project(tmp_path_factory.mktemp("faults") / "project")
    (project / "conf/local/parameters.yml").write_text(yaml.safe_dump(QUICK), encoding="utf-8")
    (project / "my_rewards.py").write_text(REWARD, encoding="utf-8")
    done = paste(".venv/bin/kedro run", project)
    assert done.returncode == 0, done.stderr
    return kept(project)


def contents(project: Path) -> set[str]:
    """Digests of `PARTS` and of each checkpoint; a training that starts again moves these to checkpoints.previous."""
    steps = (project / "data/06_models").glob("checkpoints*/*step-*")
    return {tree_digest(path) for path in (*(project / part for part in PARTS), *steps)}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_as_the_page_says_and_loses_nothing(fault: str, finished: Path) -> None:
    project = restored(finished)
    (options, edit), (code, says) = FAULTS[fault], PAGE[fault]
    if edit is not None:
        edit(project)
    before = contents(project)
    done = paste(f"{'ulimit -f 300; ' if 'ulimit' in fault else ''}.venv/bin/kedro run {options}", project)
    assert done.returncode == code, done.stdout + done.stderr
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if code:
        assert contents(project) >= before


def test_the_page_has_every_fault() -> None:
    assert list(FAULTS) == list(PAGE)
    assert f"these {len(FAULTS)} faults" in TEXT
