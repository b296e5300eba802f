"""What a retraining does where nothing that decides has changed, on DVC stages of shell commands."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.defaults import parameters
from tests.evaluation.painter import records
from visual_grpo.datasets import RecordsDataset
from visual_grpo.pipelines.promote.gate_settings import gate_settings
from visual_grpo.retraining.commands import Commands, dvc
from visual_grpo.retraining.job import Retraining
from visual_grpo.retraining.outcome import Code, Outcome, StageFailedError
from visual_grpo.retraining.stages import Stages
from visual_grpo.retraining.training_start import TrainingStart
from visual_grpo.tracking.champions import Champions
from visual_grpo.trained_adapters import adapter_digest

pytestmark = pytest.mark.slow

STAGES = """
vars: [start.yml]
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


class Project:
    """Trained and judged once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in {
            "dvc.yaml": STAGES,
            "train.sh": TRAIN,
            "raw.txt": "a",
            "settings.yml": "1",
            "start.yml": 'train_params: ""',
        }.items():
            (folder / name).write_text(text)
        rows = [{"id": r.id, "prompt": r.prompt, "split": r.split} for r in records("train", 3)]
        RecordsDataset(filepath=str(folder / "data/05_model_input/records.parquet")).save(rows)
        subprocess.run(dvc("init", "--no-scm", "--quiet"), cwd=folder, check=True)
        subprocess.run(dvc("repro", "--quiet"), cwd=folder, check=True)
        self.judged()

    @property
    def tracking_uri(self) -> str:
        return f"sqlite:///{self.folder / 'mlflow.db'}"

    def judged(self, **changes: Any) -> None:
        config = parameters(**changes)
        digest = adapter_digest(Path(config.adapters_folder))
        Champions.of(config, self.tracking_uri).note_gate(digest, gate_settings(config), promoted=False)

    def retrain(self, **changes: Any) -> Outcome:
        commands = Commands(project=self.folder, deadline=None)
        stages, start = Stages(Path("dvc.yaml"), commands), TrainingStart(Path("start.yml"))
        config = parameters(**({"retrain": {"data": {"min_records": 1}}} | changes))
        return Retraining(config, None, self.tracking_uri, stages, start, commands).run()

    @property
    def trainings(self) -> int:
        return len((self.folder / "trained").read_text().splitlines())


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.chdir(tmp_path)
    return Project(tmp_path)


def test_a_change_that_the_training_does_not_depend_on_asks_for_no_gate(
    project: Project, capfd: pytest.CaptureFixture[str]
) -> None:
    (project.folder / "settings.yml").write_text("2")
    outcome = project.retrain()
    assert (outcome.code, outcome.reason, project.trainings) == (Code.DONE, None, 1)
    assert outcome.sentence.startswith("nothing to do")
    said = capfd.readouterr().out
    assert "Reason: check: settings.yml modified" in said
    assert "Nothing was trained" in said
    assert "To track the changes with git" not in said
    assert "Reason" not in (project.retrain(), capfd.readouterr().out)[1]


def test_other_settings_of_the_gate_and_another_training_ask_for_one(project: Project) -> None:
    gate = pytest.raises(StageFailedError, match=r"^kedro run --pipeline=promote ended with")  # There is no project.
    with gate:
        project.retrain(promotion={"margin": 0.01})
    assert project.trainings == 1
    project.judged(promotion={"margin": 0.01})
    assert project.retrain(promotion={"margin": 0.01}).reason is None
    (project.folder / "raw.txt").write_text("b")
    with gate:
        project.retrain()
    assert project.trainings == 2


def test_where_every_call_is_to_train_it_trains_also_beside_such_a_change(project: Project) -> None:
    (project.folder / "settings.yml").write_text("2")
    with pytest.raises(StageFailedError, match="promote"):
        project.retrain(retrain={"when": "always", "data": {"min_records": 1}})
    assert project.trainings == 2
    assert "train.seed=1" in (project.folder / "start.yml").read_text()
