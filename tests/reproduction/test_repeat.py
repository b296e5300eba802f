"""What cannot be repeated is refused before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.defaults import parameters
from tests.reproduction.repositories import repository
from visual_grpo.errors import UserError
from visual_grpo.pipelines.reproduce import reproduce_training, require_match
from visual_grpo.reproduction.repeat import Training, repeat
from visual_grpo.reproduction.repeatable import check_repeatable
from visual_grpo.trained_adapters import ADJUSTED

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
    assert "so no single training is the same" in said


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        (
            {"source.digest": "a" * 64, "resumed.source.digest": "b" * 64},
            "(source files of this project: aaaaaaaaaaaa, b",
        ),
        ({"resumed.numerics": "torch 3"}, "other versions of libraries, or kind of processor, so"),
        (
            {ADJUSTED: "grpo.steps: 2, 3 after step 2"},
            "other parameters than it began with (grpo.steps: 2, 3 after step",
        ),
        ({ADJUSTED: "grpo.micro_batch_size: 8, 4 after step 2"}, "(grpo.micro_batch_size: 8, 4 after step 2)"),
    ],
)
def test_a_training_whose_parts_are_not_of_one(tmp_path: Path, facts: dict[str, str], told: str) -> None:
    said = refusal(tmp_path, **{"numerics": "torch 2, cpu x86_64 AVX2", **facts})
    assert told in said
    assert "train again from step 1 (resume=never)" in said


def test_a_gpus_parts_may_round_otherwise_but_no_more(tmp_path: Path) -> None:
    on_gpu = {"parameters": TREE, "git.commit": "a", "numerics": "torch 2, cuda x86_64 AVX2 A100"}
    smaller = {ADJUSTED: "grpo.micro_batch_size: 8, 4 after step 2", "resumed.numerics": "torch 2, cuda H100"}
    check_repeatable(tmp_path, on_gpu | smaller)
    with pytest.raises(UserError, match=r"\(evaluation\.every: 10, 5 after step 2\)"):
        check_repeatable(tmp_path, on_gpu | {ADJUSTED: f"{smaller[ADJUSTED]}\nevaluation.every: 10, 5 after step 2"})


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
