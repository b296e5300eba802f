"""The file with what the next training is given."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from visual_grpo.errors import UserError
from visual_grpo.retraining.training_start import TrainingStart

HEADER = "# What this is for.\n"


def params(file: Path) -> str:
    text: str = yaml.safe_load(file.read_text())["train_params"]
    return text


def test_start_and_seed_are_kept_apart_and_comments_stay(tmp_path: Path) -> None:
    file = tmp_path / "start.yml"
    file.write_text(f'{HEADER}train_params: ""\n')
    start = TrainingStart(file)
    assert start.set_start("models:/visual_grpo/3")
    assert params(file) == "train.start=models:/visual_grpo/3"
    assert start.next_seed(4) == 5
    assert start.next_seed(4) == 6
    assert params(file) == "train.start=models:/visual_grpo/3,train.seed=6"
    assert start.set_start(None)
    assert params(file) == "train.seed=6"
    assert file.read_text().startswith(HEADER)


def test_what_is_there_already_is_not_written_again(tmp_path: Path) -> None:
    file = tmp_path / "start.yml"
    start = TrainingStart(file)
    assert not start.set_start(None)
    assert not file.exists()
    assert start.set_start("models:/visual_grpo/3")
    before = file.stat().st_mtime_ns
    assert not start.set_start("models:/visual_grpo/3")
    assert file.stat().st_mtime_ns == before


def test_other_parameters_of_the_user_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "start.yml"
    file.write_text('train_params: "grpo.steps=100, grpo.loss=dapo"\n')
    TrainingStart(file).next_seed(0)
    assert params(file) == "grpo.steps=100,grpo.loss=dapo,train.seed=1"


@pytest.mark.parametrize("text", ["train_params: 3\n", "other: x\n", "[]\n"])
def test_a_file_that_says_something_else_is_refused_by_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "start.yml"
    file.write_text(text)
    with pytest.raises(UserError, match=rf"{file}: expected train_params: with a text such as train\.seed=3"):
        TrainingStart(file).set_start(None)
