"""What cannot be repeated is refused before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.defaults import parameters
from tests.reproduction.repositories import repository
from visual_grpo.errors import UserError
from visual_grpo.pipelines.reproduce.nodes import reproduce_training, require_match
from visual_grpo.reproduction.repeat import Training, repeat

TREE = parameters().model_dump(mode="json")


def refusal(folder: Path, **facts: Any) -> str:
    project = folder / "project"
    state = repository(project)
    known = {"parameters": TREE, "git.commit": state, "git.state": "clean"} | facts
    training = Training(project=project, adapters=folder, facts={k: v for k, v in known.items() if v}, hashes={})
    with pytest.raises(UserError) as refused:
        repeat(training, TREE, tolerance=0.1, keep=False, note=print)
    return str(refused.value)


def test_a_training_without_a_commit(tmp_path: Path) -> None:
    assert "training.json names no commit" in refusal(tmp_path, **{"git.commit": None})


def test_a_training_that_went_on_with_other_code(tmp_path: Path) -> None:
    said = refusal(tmp_path, **{"resumed.git.commit": "later1\nlater2", "resumed.command": "go on"})
    assert "was resumed with other code than it began with" in said
    assert "later1, later2" in said
    assert "so no single commit makes it again" in said


def test_a_training_whose_changes_are_lost(tmp_path: Path) -> None:
    assert "has no changes.diff any more" in refusal(tmp_path, **{"git.state": "dirty"})


def test_a_commit_without_a_lock(tmp_path: Path) -> None:
    assert "has no requirements.lock" in refusal(tmp_path)


def test_no_run_and_an_unknown_one_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name the training with run=ID"):
        reproduce_training(parameters())
    with pytest.raises(UserError, match=r"^run: .*has no training\.json"):
        reproduce_training(parameters(run=str(tmp_path)))


def test_what_does_not_match_ends_the_command() -> None:
    require_match({"matches": True, "sentence": "all of it"})
    with pytest.raises(UserError, match="data was a in the run"):
        require_match({"matches": False, "sentence": "Not reproduced: data was a in the run, and is b."})
