"""What a retraining does with DVC stages of shell commands: reasons, refused data, the gate."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow
import pytest

from tests.evaluation.defaults import parameters
from tests.evaluation.painter import records
from visual_grpo.datasets import RecordsDataset
from visual_grpo.errors import UserError
from visual_grpo.pipelines.promote import gate_settings
from visual_grpo.programs import OutOfTimeError, ProgramError
from visual_grpo.retraining.job import Retraining
from visual_grpo.retraining.outcome import Code, DataRefusedError, Outcome
from visual_grpo.retraining.project import Project
from visual_grpo.tracking.registry import Registry
from visual_grpo.trained_adapters import adapter_digest

pytestmark = pytest.mark.slow

STAGES = """
stages:
  check: {cmd: "true", deps: [settings.yml]}
  data_preparation: {cmd: cp raw.txt prepared.txt, deps: [raw.txt], outs: [prepared.txt]}
  train:
    cmd: sh train.sh '${train_params}'
    deps: [prepared.txt]
    outs: [data/06_models/adapters]
"""
TRAIN = """
mkdir -p data/06_models/adapters/ar
cat prepared.txt > data/06_models/adapters/ar/adapter_model.safetensors
echo "{\\"steps\\": 1, \\"started\\": \\"$(date +%N) $1\\"}" > data/06_models/adapters/training.json
echo trained >> trained
"""


DVC = [sys.executable, "-m", "dvc"]


class Trained:
    """A folder that was trained in and judged once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.use_mlflow()
        files = {"dvc.yaml": STAGES, "train.sh": TRAIN, "raw.txt": "a", "settings.yml": "1"}
        for name, text in {**files, "params.yaml": "train_params: ''"}.items():
            (folder / name).write_text(text)
        rows = [{"id": r.id, "prompt": r.prompt, "split": r.split} for r in records("train", 3)]
        RecordsDataset(filepath=str(folder / "data/05_model_input/records.parquet")).save(rows)
        subprocess.run([*DVC, "init", "--no-scm", "--quiet"], cwd=folder, check=True)
        subprocess.run([*DVC, "repro", "--quiet"], cwd=folder, check=True)
        self.judged()

    def use_mlflow(self) -> None:
        mlflow.set_tracking_uri(f"sqlite:///{self.folder / 'mlflow.db'}")

    def judged(self, **changes: Any) -> None:
        config = parameters(**changes)
        digest = adapter_digest(Path(config.adapters_folder))
        Registry.of(config).note_gate(digest, gate_settings(config), promoted=False)

    def retraining(self, **changes: Any) -> Retraining:
        config = parameters(**({"retrain": {"data": {"min_records": 1}}} | changes))
        return Retraining(Project(config, None))

    def retrain(self, **changes: Any) -> Outcome:
        return self.retraining(**changes).run()

    @property
    def trainings(self) -> int:
        return len((self.folder / "trained").read_text().splitlines())


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return Trained(folder).folder


@pytest.fixture
def project(once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trained:
    found = Trained.__new__(Trained)
    found.folder = Path(shutil.copytree(once, tmp_path / "project"))
    monkeypatch.chdir(found.folder)
    found.use_mlflow()
    return found


def test_a_change_that_the_training_does_not_depend_on_asks_for_no_gate(
    project: Trained, capfd: pytest.CaptureFixture[str]
) -> None:
    (project.folder / "settings.yml").write_text("2")
    outcome = project.retrain()
    assert (outcome.code, outcome.reason, project.trainings) == (Code.DONE, None, 1)
    assert outcome.sentence.startswith("nothing to do")
    said = capfd.readouterr().out
    assert "Reason: check: settings.yml modified" in said
    assert "Nothing was trained" in said
    assert "Reason" not in (project.retrain(), capfd.readouterr().out)[1]


def test_other_settings_of_the_gate_and_another_training_ask_for_one(project: Trained) -> None:
    gate = pytest.raises(ProgramError, match=r"^kedro run --pipeline=promote: ")  # There is no project.
    with gate:
        project.retrain(promotion={"margin": 0.01})
    assert project.trainings == 1
    project.judged(promotion={"margin": 0.01})
    assert project.retrain(promotion={"margin": 0.01}).reason is None
    (project.folder / "raw.txt").write_text("b")
    with gate:
        project.retrain()
    assert project.trainings == 2


def test_where_every_call_is_to_train_it_trains_also_beside_such_a_change(project: Trained) -> None:
    (project.folder / "settings.yml").write_text("2")
    with pytest.raises(ProgramError, match="promote"):
        project.retrain(retrain={"when": "always", "data": {"min_records": 1}})
    assert project.trainings == 2
    assert "train.seed=1" in (project.folder / "params.yaml").read_text()


def test_time_that_is_over_stops_the_stage_and_more_steps_than_allowed_are_refused(project: Trained) -> None:
    (project.folder / "raw.txt").write_text("b")
    with pytest.raises(OutOfTimeError):
        project.retrain(retrain={"hours": 1e-9})
    with pytest.raises(UserError, match=r"more than retrain\.max_steps = 1 allows"):
        project.retrain(retrain={"max_steps": 1}, grpo={"steps": 2})


def refuse() -> None:
    raise DataRefusedError("too few")


def die() -> None:
    raise KeyboardInterrupt


def test_data_that_are_refused_make_room_for_the_earlier_ones(project: Trained) -> None:
    """Also in the call after one that was killed before the check, and where they cannot be prepared."""
    raw, prepared, stages = project.folder / "raw.txt", project.folder / "prepared.txt", project.retraining().stages
    lock = stages.lock.read_bytes()
    raw.write_text("later")
    with pytest.raises(DataRefusedError, match=r"^too few$"):
        stages.prepare(refuse)
    assert (prepared.read_text(), stages.lock.read_bytes()) == ("a", lock)
    with pytest.raises(KeyboardInterrupt):
        stages.prepare(die)
    assert prepared.read_text() == "later"
    raw.unlink()
    with pytest.raises(ProgramError, match="dvc repro"):
        stages.prepare(lambda: None)
    assert (prepared.read_text(), stages.lock.read_bytes()) == ("a", lock)
    raw.write_text("later")
    stages.prepare(lambda: None)
    assert prepared.read_text() == "later"


def test_imported_data_are_updated(project: Trained, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("1")
    subprocess.run([*DVC, "import-url", "--quiet", str(tmp_path / "elsewhere"), "mine"], check=True)
    (tmp_path / "elsewhere").write_text("22")
    assert project.retraining().stages.update_imports() == ["mine.dvc"]
    assert Path("mine").read_text() == "22"
