"""What a retraining decides without DVC: who is told, the score that somebody else measures, the start, the data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlflow
import pytest

from tests.evaluation.defaults import parameters
from tests.small_project import ROOT
from tests.tracking.toy_adapters import adapters, base_model
from visual_grpo.common.errors import UserError
from visual_grpo.config import DataChecks, MonitorConfig, RetrainConfig
from visual_grpo.data.drift import profile_of, write_profile
from visual_grpo.data.manifest import RecordTable, write_manifest
from visual_grpo.operations.retraining import job
from visual_grpo.operations.retraining.data_check import problems
from visual_grpo.operations.retraining.job import DataRefusedError, Retraining, is_due, monitored, notify
from visual_grpo.operations.retraining.project import Project
from visual_grpo.tracking.adapter_lookup import Registered
from visual_grpo.tracking.registry import Registry

SUMMARY = {"code": 0, "sentence": "promoted", "reason": "data changed"}


def test_a_command_gets_the_summary_as_its_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    notify(RetrainConfig(notify="cat > told.json"), SUMMARY)
    assert json.loads((tmp_path / "told.json").read_text()) == SUMMARY
    notify(RetrainConfig(notify="echo no mail >&2; exit 7"), SUMMARY)
    assert capsys.readouterr().out == "Warning: the command of retrain.notify failed: no mail\n"


@pytest.mark.parametrize(
    ("when", "code", "reason", "due"),
    [
        ("work", 0, None, False),
        ("work", 0, "data", True),
        ("work", 3, "data", True),
        ("work", 1, None, True),
        ("always", 0, None, True),
        ("failure", 0, "data", False),
        ("failure", 3, "data", False),
        ("failure", 6, "data", True),
    ],
)
def test_when_somebody_is_told(when: Any, code: int, reason: str | None, due: bool) -> None:
    assert is_due(RetrainConfig(notify_when=when), {"code": code, "reason": reason}) is due


def test_a_score_is_the_last_line_of_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert monitored(MonitorConfig()) is None
    assert monitored(MonitorConfig(command="printf '\\377\\n0.5\\n'")) == 0.5
    for command, said in {
        "echo broken >&2; exit 3": "must print a number last: echo broken >&2; exit 3\nbroken",
        "echo nan": "printed nan, which is not a number: echo nan",
        "true": "must print a number last: true\n",
    }.items():
        with pytest.raises(UserError) as told:
            monitored(MonitorConfig(command=command))
        assert said in str(told.value)


def retraining(**settings: Any) -> Retraining:
    return Retraining(Project(parameters(retrain=settings), None))


@pytest.mark.parametrize(("score", "is_due"), [(0.5, True), (0.9, False), (0.95, False)])
def test_a_score_below_its_floor_asks_for_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, score: float, is_due: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    found = retraining(monitor={"command": f"echo {score}", "floor": 0.9})._asked_for()
    assert found == (["the monitored score is 0.5, below 0.9"] if is_due else [])


def test_the_next_seed_is_that_after_the_last_trainings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    asked = retraining()
    for seed in ("1", "2"):
        assert asked._next_seed() == seed
        asked.project.write(**{"train.seed": seed})
    asked.project.write(**{"train.seed": None, "seed": "7"})
    assert asked._next_seed() == "8"


CHAMPION = Registered("visual_grpo", 3, {})


@pytest.mark.parametrize(
    ("start", "champion", "found"),
    [("base", CHAMPION, None), ("champion", CHAMPION, "models:/visual_grpo/3"), ("champion", None, None)],
)
def test_a_training_starts_from_the_champion_only_where_that_is_asked_for(
    start: str, champion: Registered | None, found: str | None
) -> None:
    assert retraining(start=start)._start(champion) == found


def prepared(word: str, train: int = 95) -> RecordTable:
    file = Path("data/05_model_input/records.parquet")
    file.parent.mkdir(parents=True, exist_ok=True)
    splits = ["held_out"] * 5 + ["train"] * train
    write_manifest(file, ({"id": str(n), "prompt": f"{word} {n}", "split": s} for n, s in enumerate(splits)))
    return RecordTable(file)


def test_what_the_checks_refuse_is_not_trained_on(
    tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data that are too few, and others than the champion's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job, "_DVC", ("true",))  # Every stage is up to date.
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    records, limits = "data/05_model_input/records.parquet", DataChecks()
    trained = adapters(tmp_path / "adapters", base_model(tmp_path / "base"))
    write_profile(profile_of(prepared("a cat")), trained)
    assert problems(records, limits, trained) == []
    registry = Registry("visual_grpo")
    registry.promote(registry.register(trained).version)
    prepared("two hundred thousand quick brown foxes and dogs", train=1)
    with pytest.raises(DataRefusedError, match=r"6 usable records, expected at least(?s:.*)100\.0% of the earlier"):
        retraining()._train()
    prepared("two hundred thousand quick brown foxes and dogs")
    assert problems(records, limits, None) == []
