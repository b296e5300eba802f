"""What a retraining does with DVC stages of shell commands: reasons, refused data, the gate."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow
import pytest
import yaml

from tests.evaluation.defaults import parameters
from tests.evaluation.painter import records
from visual_grpo.adapter_folder import weights_digest
from visual_grpo.common.errors import UserError
from visual_grpo.common.processes import OutOfTimeError, ProgramError
from visual_grpo.data.manifest import write_manifest
from visual_grpo.operations.retraining.job import Code, DataRefusedError, Retraining
from visual_grpo.operations.retraining.project import Project
from visual_grpo.tracking.adapter_lookup import Registered
from visual_grpo.tracking.registry import Registry, gate_settings

pytestmark = pytest.mark.slow

STAGES = """
stages:
  check: {cmd: "true", deps: [settings.yml]}
  baseline: {cmd: cp drawn.txt baseline.txt, deps: [drawn.txt], outs: [baseline.txt]}
  data_preparation: {cmd: cp raw.txt prepared.txt, deps: [raw.txt], outs: [prepared.txt]}
  train:
    cmd: sh train.sh '${train_params}'
    deps: [prepared.txt, baseline.txt]
    outs: [data/06_models/adapters]
"""
TRAIN = """
mkdir -p data/06_models/adapters/ar
echo "$(cat prepared.txt baseline.txt) $1" > data/06_models/adapters/ar/adapter_model.safetensors
echo "{\\"steps\\": 1, \\"started\\": \\"$(date +%N) $1\\"}" > data/06_models/adapters/training.json
echo trained >> trained
"""


DVC = [sys.executable, "-m", "dvc"]


class Trained:
    """A folder that was trained in and judged once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.use_mlflow()
        files = {"dvc.yaml": STAGES, "train.sh": TRAIN, "raw.txt": "a", "drawn.txt": "1", "settings.yml": "1"}
        for name, text in {**files, "params.yaml": "train_params: ''"}.items():
            (folder / name).write_text(text)
        self.prepare("train", "held_out")
        subprocess.run([*DVC, "init", "--no-scm", "--quiet"], cwd=folder, check=True)
        subprocess.run([*DVC, "repro", "--quiet"], cwd=folder, check=True)
        self.judged()

    def prepare(self, *splits: str) -> None:
        rows = [{"id": r.id, "prompt": r.prompt, "split": r.split} for split in splits for r in records(split, 3)]
        write_manifest(self.folder / "data/05_model_input/records.parquet", rows)

    def use_mlflow(self) -> None:
        mlflow.set_tracking_uri(f"sqlite:///{self.folder / 'mlflow.db'}")

    def judged(self, **changes: Any) -> None:
        config = parameters(**changes)
        digest = weights_digest(Project(config, None).place("adapters"))
        Registry.of(config.promotion, config.output).note_gate(
            digest, gate_settings(config.promotion, config.evaluation)
        )

    def retraining(self, **changes: Any) -> Retraining:
        config = parameters(**({"retrain": {"data": {"min_records": 1}}} | changes))
        return Retraining(Project(config, None))

    def retrain(self, **changes: Any) -> dict[str, Any]:
        return self.retraining(**changes).run()

    @property
    def train_params(self) -> str:
        return str(yaml.safe_load((self.folder / "params.yaml").read_text())["train_params"])

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
    assert (outcome["code"], outcome["reason"], project.trainings) == (Code.DONE, None, 1)
    assert outcome["sentence"].startswith("nothing to do")
    said = capfd.readouterr().out
    assert "Reason: check: changed deps: settings.yml: modified" in said
    assert "Reason" not in (project.retrain(), capfd.readouterr().out)[1]


def test_other_settings_of_the_gate_and_another_training_ask_for_one(project: Trained) -> None:
    gate = pytest.raises(ProgramError, match=r"^kedro run --pipeline=promote: ")  # There is no project.
    with gate:
        project.retrain(promotion={"margin": 0.01})
    assert project.trainings == 1
    project.judged(promotion={"margin": 0.01})
    assert project.retrain(promotion={"margin": 0.01})["reason"] is None
    (project.folder / "raw.txt").write_text("b")
    with gate:
        project.retrain()
    assert project.trainings == 2


def test_where_every_call_is_to_train_it_trains_also_beside_such_a_change(project: Trained) -> None:
    (project.folder / "settings.yml").write_text("2")
    with pytest.raises(ProgramError, match="promote"):
        project.retrain(retrain={"when": "always", "data": {"min_records": 1}})
    assert (project.trainings, project.train_params) == (2, "train.seed=1")


@pytest.mark.parametrize(
    ("file", "text", "params"),
    [("raw.txt", "b", ""), ("dvc.yaml", STAGES.replace("cp raw", "cp ./raw"), "train.seed=1")],
)
def test_where_every_call_is_to_train_the_seed_is_the_next_one_only_where_nothing_else_differs(
    project: Trained, file: str, text: str, params: str
) -> None:
    """The second change gives the same prepared data."""
    (project.folder / file).write_text(text)
    with pytest.raises(ProgramError, match="promote"):
        project.retrain(retrain={"when": "always", "data": {"min_records": 1}})
    assert (project.trainings, project.train_params) == (2, params)


def test_where_the_baseline_alone_has_changed_a_retraining_starts_from_the_present_champion(
    project: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Retraining, "_check_data", lambda self, champion: None)
    monkeypatch.setattr(Registry, "champion", lambda self: Registered("visual_grpo", 4, {}))
    for text, start, params in (("2", "champion", "train.start=models:/visual_grpo/4"), ("3", "base", "")):
        (project.folder / "drawn.txt").write_text(text)
        with pytest.raises(ProgramError, match="promote"):
            project.retrain(retrain={"start": start})
        assert project.train_params == params
    assert project.trainings == 3


@pytest.mark.parametrize(
    ("edited", "changes", "said"),
    [
        (None, {}, "nothing to do"),
        ("settings.yml", {}, "would update stages that the training does not depend on:\n  check: changed deps"),
        (
            "raw.txt",
            {"grpo": {"steps": 7}},
            "would train 7 steps and judge the adapter if what comes before gives a different result",
        ),
        (None, {"promotion": {"margin": 0.01}}, "would judge the last training"),
        (
            None,
            {"retrain": {"when": "always"}},
            "would train 80 steps and judge the adapter:\n  retrain.when is always",
        ),
    ],
)
def test_a_dry_run_says_what_would_happen(
    project: Trained, edited: str | None, changes: dict[str, Any], said: str
) -> None:
    if edited is not None:
        (project.folder / edited).write_text("b")
    assert project.retraining(**changes).foreseen().startswith(said)
    assert (project.trainings, (project.folder / "prepared.txt").read_text()) == (1, "a")
    assert "train.seed" not in (project.folder / "params.yaml").read_text()


def test_a_status_that_dvc_cannot_give_is_told_without_codes_of_the_terminal(project: Trained) -> None:
    Path("dvc.yaml").write_text("stages: [")
    with pytest.raises(ProgramError, match=r"^dvc status: [^\x1b]*dvc\.yaml[^\x1b]*$"):
        project.retraining(retrain={"update": False}).foreseen()


def test_what_cannot_end_well_is_refused_before_anything_runs(project: Trained) -> None:
    (project.folder / "raw.txt").write_text("b")
    with pytest.raises(OutOfTimeError):
        project.retrain(retrain={"hours": 1e-9})
    for call in (project.retrain, lambda **changes: project.retraining(**changes).foreseen()):
        with pytest.raises(UserError, match=r"more than retrain\.max_steps = 1 allows"):
            call(retrain={"max_steps": 1}, grpo={"steps": 2})
    Path("params.yaml").write_text("train_params: grpo.steps=3")
    with pytest.raises(UserError, match=r"grpo\.steps is 3, more than retrain\.max_steps = 2 allows"):
        project.retrain(retrain={"max_steps": 2}, grpo={"steps": 2})
    assert (project.folder / "prepared.txt").read_text() == "a"


def test_refused_data_are_refused_until_they_are_mended(project: Trained) -> None:
    raw, few = project.folder / "raw.txt", {"data": {"min_records": 100}}
    raw.write_text("b")
    for _ in range(2):
        with pytest.raises(DataRefusedError, match=r"nothing was trained(?s:.)*expected at least 100"):
            project.retrain(retrain=few)
    raw.write_text("a")
    assert (project.retrain()["reason"], project.trainings) == (None, 1)


def test_data_of_which_nothing_is_held_out_are_refused(project: Trained) -> None:
    (project.folder / "raw.txt").write_text("b")
    project.prepare("train")
    with pytest.raises(
        DataRefusedError, match=r"nothing was trained(?s:.)*Nothing is held out, so no gate could judge"
    ):
        project.retrain()
    assert project.trainings == 1


def test_imported_data_are_updated(project: Trained, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("1")
    subprocess.run([*DVC, "import-url", "--quiet", str(tmp_path / "elsewhere"), "mine"], check=True)
    (tmp_path / "elsewhere").write_text("22")
    project.retraining().update_imports()
    assert Path("mine").read_text() == "22"
    (tmp_path / "elsewhere").unlink()
    assert project.retraining(retrain={"update": False}).foreseen() == "nothing to do"
    with pytest.raises(ProgramError, match=r"^dvc update mine\.dvc: failed update data: dependency '.*elsewhere' does"):
        project.retraining().update_imports()
