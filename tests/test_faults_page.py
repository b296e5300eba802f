"""docs/faults.md: each fault is planted in a finished project, and the command that meets it ends as the page says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.small_project import ROOT, paste, small_project
from visual_grpo.files import tree_digest

CHECKPOINTS, BASELINE = "data/06_models/checkpoints", "data/07_model_output/baseline"
PARTS = ("data/06_models/adapters", "data/06_models/base", BASELINE, "data/05_model_input", "data/08_reporting")
"""What a user would miss, beside the checkpoints."""
QUICK = {
    "policy": {"train": "ar"},
    "sampling": {"stock": {"steps": 3}},
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


@dataclass(frozen=True)
class Fault:
    what: str
    run: str
    code: int
    says: str
    edit: Callable[[Path], object] = lambda project: None


def flip(pattern: str) -> Callable[[Path], object]:
    """Flips one bit of the largest file that fits."""

    def edit(project: Path) -> None:
        file = max(project.glob(pattern), key=lambda file: file.stat().st_size)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)

    return edit


def halve(name: str) -> Callable[[Path], object]:
    return lambda project: (project / name).write_bytes(
        (project / name).read_bytes()[: (project / name).stat().st_size // 2]
    )


def remove(name: str) -> Callable[[Path], object]:
    return lambda project: shutil.rmtree(project / name) if (project / name).is_dir() else (project / name).unlink()


def write(name: str, text: str) -> Callable[[Path], object]:
    def edit(project: Path) -> None:
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(text, encoding="utf-8")

    return edit


def damage_all(project: Path) -> None:
    for name in ("1", "2"):
        flip(f"{CHECKPOINTS}/step-00000{name}/state.safetensors")(project)


FAULTS = (
    Fault("One bit of the newest checkpoint is flipped", RESUME, 0, "is damaged", flip(f"{CHECKPOINTS}/step-000002/*")),
    Fault(
        "A file of the newest checkpoint is gone",
        RESUME,
        0,
        "facts.json is missing",
        remove(f"{CHECKPOINTS}/step-000002/facts.json"),
    ),
    Fault("Every checkpoint is damaged", RESUME, 1, "No checkpoint in", damage_all),
    Fault(
        "`resume` names a folder without a checkpoint",
        "--pipeline=train --params=resume=data/01_raw",
        1,
        "has no checkpoint in it",
    ),
    Fault(
        "A resumed run is given another learning rate",
        f"{RESUME},grpo.learning_rate=0.1",
        1,
        "going on would mix two runs",
    ),
    Fault(
        "One bit of the adapters is flipped",
        EVALUATE,
        1,
        "is not the file that the training left there",
        flip("data/06_models/adapters/ar/*.safetensors"),
    ),
    Fault(
        "The adapters are gone", EVALUATE, 1, "Inputs of this pipeline are missing", remove("data/06_models/adapters")
    ),
    Fault(
        "`adapter` names no run",
        f"{EVALUATE} --params=adapter=nosuchrun",
        1,
        "there is no folder and no MLflow run 'nosuchrun'",
    ),
    Fault("The baseline is gone", TRAIN, 1, "Inputs of this pipeline are missing", remove(BASELINE)),
    Fault("The baseline's table is half gone", TRAIN, 1, "scores.parquet", halve(f"{BASELINE}/scores.parquet")),
    Fault("The records' table is half gone", TRAIN, 1, "records.parquet", halve("data/05_model_input/records.parquet")),
    Fault(
        "One bit of the base model is flipped",
        EVALUATE,
        1,
        "is not what it was when the starter pipeline ran",
        flip("data/06_models/base/**/*.safetensors"),
    ),
    Fault(
        "`06_models/starter.json` is half gone",
        TRAIN,
        1,
        "06_models/starter.json",
        halve("data/06_models/starter.json"),
    ),
    Fault(
        "A reward raises at its first call",
        TRAIN,
        1,
        "reward 'mine' failed on the records",
        write("trouble.py", "raise KeyError('colour')"),
    ),
    Fault(
        "A reward gives NaN for all samples",
        TRAIN,
        1,
        "without a score there is nothing to train on",
        write("trouble.py", "scores = [float('nan') for _ in scores]"),
    ),
    Fault(
        "A reward ends the program",
        TRAIN,
        1,
        "reward 'mine' failed on the records",
        write("trouble.py", "raise SystemExit(0)"),
    ),
    Fault(
        "A reward's file imports what is not there",
        TRAIN,
        1,
        "No module named 'no_such_package'",
        write("my_rewards.py", "import no_such_package"),
    ),
    Fault(
        "A reward's code is edited after the baseline",
        TRAIN,
        1,
        "the baseline does not pair with this run",
        write("my_rewards.py", REWARD.replace("255", "256")),
    ),
    Fault(
        "The learning rate is absurd, and the loss becomes NaN",
        f"{TRAIN},grpo.learning_rate=1e30",
        1,
        "The loss became nan at step 1",
    ),
    Fault("The folder of data does not exist", PREPARE, 1, "mine"),
    Fault("The folder of data has nothing in it", PREPARE, 1, "mine", lambda project: (project / "mine").mkdir()),
    Fault("No file may have more than 300 kB (`ulimit -f`)", TRAIN, 1, "File too large"),
    Fault(
        "A parameter is misspelt",
        "--pipeline=train --params=grpo.stepz=3",
        1,
        "there is no such parameter. Did you mean 'grpo.steps'?",
    ),
    Fault("A number is a word", "--pipeline=train --params=grpo.steps=many", 1, "should be a valid integer"),
    Fault(
        "`conf/local/parameters.yml` is no YAML",
        TRAIN,
        1,
        "Invalid YAML",
        write("conf/local/parameters.yml", "grpo: [1\n"),
    ),
    Fault("An environment does not exist", "--env=glm_imag", 1, "There is no environment 'glm_imag'"),
    Fault("A pipeline does not exist", "--pipeline=trian", 1, "There is no pipeline 'trian'. Did you mean 'train'?"),
    Fault("The GPU does not exist", f"{TRAIN},model.device=cuda:99", 1, "model.device is 'cuda:99'"),
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = small_project(tmp_path_factory.mktemp("faults") / "project")
    (project / "conf/local/parameters.yml").write_text(yaml.safe_dump(QUICK), encoding="utf-8")
    (project / "my_rewards.py").write_text(REWARD, encoding="utf-8")
    done = paste(".venv/bin/kedro run", project)
    assert done.returncode == 0, done.stderr
    return project


def contents(project: Path) -> set[str]:
    """Digests of `PARTS` and of each checkpoint; a training that starts again moves these to checkpoints.previous."""
    steps = (project / "data/06_models").glob("checkpoints*/*step-*")
    return {tree_digest(path) for path in (*(project / part for part in PARTS), *steps)}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_fault_ends_as_the_page_says_and_loses_nothing(fault: Fault, finished: Path, tmp_path: Path) -> None:
    project = shutil.copytree(finished, tmp_path / "project", symlinks=True)
    fault.edit(project)
    before = contents(project)
    done = paste(f"{'ulimit -f 300; ' if 'ulimit' in fault.what else ''}.venv/bin/kedro run {fault.run}", project)
    assert done.returncode == fault.code, done.stdout + done.stderr
    assert fault.says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if fault.code:
        assert contents(project) >= before


def test_the_page_has_every_fault() -> None:
    page = (ROOT / "docs/faults.md").read_text(encoding="utf-8")
    for fault in FAULTS:
        assert f"| {fault.what} | {fault.code} | `{fault.says}` |" in page
